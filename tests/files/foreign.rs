//! Dumps of other engines as their users hand them over: names, layouts, formats and ranks, through the built program.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use parity_dump::{Checkpoint, Element, Kind};
use predicates::prelude::*;
use predicates::str::contains;
use tempfile::TempDir;

use crate::support::dumps::{as_hf, healthy, nameless, tensors, tokens};
use crate::support::files;
use crate::support::files::{Tensor, npy, npz, safetensors, torch};
use crate::support::program::parity;

pub const F16: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";

pub fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    (dir, path)
}

pub fn audit(path: &Path) -> Command {
    let mut command = parity(&["audit", path.to_str().unwrap(), "-m", F16]);
    command.args(["--allow-missing"]);
    command
}

#[test]
fn every_format_is_read_and_the_map_is_found_by_itself() {
    let (_dir, at) = folder();
    let (named, ids) = (as_hf(), tokens());
    let files: [(&str, Vec<u8>); 4] = [
        ("a.safetensors", safetensors(&named, &ids)),
        ("b.npz", npz(&named, &ids, false)),
        ("c.npz", npz(&named, &ids, true)),
        ("d.pt", torch(&named, &ids)),
    ];
    for (name, bytes) in files {
        fs::write(at.join(name), bytes).unwrap();
        audit(&at.join(name)).assert().code(0).stdout(contains("built-in map hf").and(contains("PARITY")));
        let diff = ["diff", at.join(name).to_str().unwrap(), healthy().to_str().unwrap(), "-m", F16]
            .map(str::to_owned);
        parity(&diff.each_ref().map(String::as_str)).assert().code(0).stdout(contains("PARITY"));
    }
    let arrays = at.join("arrays");
    fs::create_dir(&arrays).unwrap();
    for (name, tensor) in &named {
        fs::write(arrays.join(format!("{name}.npy")), npy(&tensor.shape, &tensor.values)).unwrap();
    }
    audit(&arrays).assert().code(2).stderr(contains("has no tokens").and(contains("--tokens")));
    let spelt: Vec<String> = ids.iter().map(i64::to_string).collect();
    audit(&arrays).args(["--tokens", &spelt.join(",")]).assert().code(0).stdout(contains("built-in map hf"));
}

#[test]
fn folders_of_sglang_and_msprobe_are_read() {
    let (_dir, at) = folder();
    let (named, ids) = (as_hf(), tokens());
    let one = |tensor: &Tensor| torch(&BTreeMap::from([("value".to_owned(), tensor.clone())]), &[]);
    let dumper = at.join("sglang");
    fs::create_dir(&dumper).unwrap();
    for (number, (name, tensor)) in named.iter().enumerate() {
        let name = match name.strip_suffix(".input") {
            Some(module) => format!("non_intrusive__{module}.inputs.0"),
            None => format!("non_intrusive__{name}.output"),
        };
        let file = format!("step=0___rank=0___dump_index={number}___name={name}.pt");
        fs::write(dumper.join(file), one(tensor)).unwrap();
    }
    let input = dumper.join("step=0___rank=0___dump_index=0___name=input_ids.pt");
    fs::write(input, files::torch_integers("value", &ids)).unwrap();
    audit(&dumper).assert().code(0).stdout(contains("read as sglang"));

    let hooked = at.join("hooked").join("TP0_PP0_Rank0_pid7");
    fs::create_dir_all(&hooked).unwrap();
    let outputs = named.clone();
    fs::write(hooked.join("Pass00000.pt"), torch(&outputs, &ids)).unwrap();
    audit(&at.join("hooked")).assert().code(0).stdout(contains("PARITY"));

    let probe = at.join("msprobe/step0/rank");
    fs::create_dir_all(probe.join("dump_tensor_data")).unwrap();
    let mut data = serde_json::Map::new();
    for (name, tensor) in &named {
        let (module, side, key) = match name.strip_suffix(".input") {
            Some(module) => (module, "input", "input_args"),
            None => (name.as_str(), "output", "output"),
        };
        let call = format!("Module.{module}.Class.forward.0");
        let file = format!("{call}.{side}.0.pt");
        fs::write(probe.join("dump_tensor_data").join(&file), one(tensor)).unwrap();
        let entry = data.entry(call).or_insert_with(|| serde_json::json!({ "input_args": [], "output": [] }));
        entry[key].as_array_mut().unwrap().push(serde_json::json!({ "data_name": file }));
    }
    let json = serde_json::json!({ "task": "tensor", "dump_data_dir": "/elsewhere", "data": data });
    fs::write(probe.join("dump.json"), json.to_string()).unwrap();
    let spelt: Vec<String> = ids.iter().map(i64::to_string).collect();
    let probed = at.join("msprobe");
    audit(&probed).args(["--tokens", &spelt.join(",")]).assert().code(0).stdout(contains("read as msprobe"));
    fs::write(probe.join("dump.json"), r#"{"task": "statistics", "data": {}}"#).unwrap();
    audit(&probed).assert().code(2).stderr(contains("\"task\": \"tensor\""));
}

#[test]
fn raw_logits_of_llama_debug_are_read() {
    let (_dir, at) = folder();
    let logits = &tensors()[&Checkpoint::global(Kind::Logits)];
    let width = logits.shape[1];
    let last: Vec<u8> =
        logits.values[logits.values.len() - width..].iter().flat_map(|x| x.to_le_bytes()).collect();
    let ids: Vec<u8> = tokens().iter().flat_map(|&token| (token as i32).to_le_bytes()).collect();
    fs::write(at.join("llamacpp-tiny.bin"), last).unwrap();
    fs::write(at.join("llamacpp-tiny-tokens.bin"), ids).unwrap();
    let reference = healthy().to_str().unwrap();
    for path in [at.join("llamacpp-tiny.bin"), at.clone()] {
        let diff = ["diff", path.to_str().unwrap(), reference, "--allow-missing", "--rtol", "1e-6"];
        parity(&diff).assert().code(0).stdout(contains("1 checkpoint"));
    }
}

#[test]
fn a_map_splits_turns_scales_and_takes_rows() {
    let (_dir, at) = folder();
    let mut named = BTreeMap::new();
    let all = tensors();
    let rows = tokens().len();
    for (id, tensor) in &all {
        let n = id.layer_index().unwrap_or(0);
        let sibling = |kind| all[&id.sibling(kind)].flat();
        match id.kind() {
            Kind::Q => drop(named.insert(
                format!("l{n}/qkv"),
                Tensor::beside(&[sibling(Kind::Q), sibling(Kind::K), sibling(Kind::V)]),
            )),
            Kind::K | Kind::V | Kind::FfnUp => {}
            Kind::FfnGate => {
                drop(named.insert(
                    format!("l{n}/gu"),
                    Tensor::woven(&[sibling(Kind::FfnGate), sibling(Kind::FfnUp)]),
                ))
            }
            Kind::QRope | Kind::KRope => {
                drop(named.insert(format!("l{n}/{}", id.kind().name()), tensor.permuted(&[2, 1, 0])));
            }
            Kind::FfnOut => drop(named.insert(format!("l{n}/down"), tensor.permuted(&[1, 0]))),
            Kind::AttnOut => drop(named.insert(format!("l{n}/o"), tensor.scaled(2.0).batched())),
            Kind::Logits => drop(named.insert("head".to_owned(), tensor.rows(rows - 2..rows))),
            kind => {
                let layer = id.layer_index().map(|n| format!("l{n}/")).unwrap_or_default();
                drop(named.insert(format!("{layer}{}", kind.name()), tensor.clone()));
            }
        }
    }
    let file = at.join("mine.safetensors");
    fs::write(&file, safetensors(&named, &tokens())).unwrap();
    let map = at.join("map.toml");
    let text = r#"
"l{n}/qkv" = [
  { id = "blk.{n}.q", columns = "0..H*E" },
  { id = "blk.{n}.k", columns = "H*E..H*E+K*E" },
  { id = "blk.{n}.v", columns = "H*E+K*E..W" },
]
"l{n}/gu" = [{ id = "blk.{n}.ffn_gate", columns = "0..W step 2" }, { id = "blk.{n}.ffn_up", columns = "1..W step 2" }]
"l{n}/q_rope" = { id = "blk.{n}.q_rope", layout = "EHT" }
"l{n}/k_rope" = { id = "blk.{n}.k_rope", layout = "(E,K,T)" }
"l{n}/down" = { id = "blk.{n}.ffn_out", transpose = [1, 0] }
"l{n}/o" = { id = "blk.{n}.attn_out", scale = 0.5 }
"head" = { id = "logits", rows = [-2, -1] }
"l{n}/attn_norm" = "blk.{n}.attn_norm"
"l{n}/attn_ctx" = "blk.{n}.attn_ctx"
"l{n}/attn_residual" = "blk.{n}.attn_residual"
"l{n}/ffn_norm" = "blk.{n}.ffn_norm"
"l{n}/ffn_act" = "blk.{n}.ffn_act"
"l{n}/layer_out" = "blk.{n}.layer_out"
"nothing.{n}" = "blk.{n}.q_norm"
"#;
    fs::write(&map, text).unwrap();
    let with = |text: &str| {
        fs::write(&map, text).unwrap();
        let mut command = audit(&file);
        command.arg("--names").arg(&map);
        command
    };
    with(text).assert().code(0).stdout(contains("PARITY").and(contains("nothing.{n}")));
    let wrong = with(&text.replace("0..H*E\"", "0..H*E*E\""));
    { wrong }
        .assert()
        .code(2)
        .stderr(contains("map.toml:2: `l{n}/qkv`").and(contains("does not have these columns")));
    let turned = with(&text.replace(", transpose = [1, 0]", ""));
    { turned }.assert().code(2).stderr(contains("transpose(0, 1)").and(contains("transpose = [1, 0]")));
    let twice = with(&text.replace("blk.{n}.ffn_norm", "blk.{n}.attn_norm"));
    { twice }.assert().code(2).stderr(contains("two tensors are blk.0.attn_norm"));
}

#[test]
fn a_file_says_the_layout_of_its_tensors() {
    let (_dir, at) = folder();
    let mut turned = BTreeMap::new();
    for (id, tensor) in tensors() {
        let tensor = match id.kind() {
            Kind::QRope | Kind::KRope => tensor.permuted(&[1, 0, 2]),
            Kind::FfnOut => tensor.permuted(&[1, 0]),
            _ => tensor,
        };
        turned.insert(id.to_string(), tensor);
    }
    let file = at.join("turned.safetensors");
    let said = |layout: &str| {
        let plain = safetensors(&turned, &tokens());
        let length = u64::from_le_bytes(plain[..8].try_into().unwrap()) as usize;
        let mut header: serde_json::Value = serde_json::from_slice(&plain[8..8 + length]).unwrap();
        if let Some(ids) = header.as_object_mut().unwrap().remove("input_ids") {
            header["tokens"] = ids;
        }
        header["__metadata__"] = serde_json::json!({ "layout": layout, "producer": "turner" });
        let header = header.to_string();
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &plain[8 + length..]].concat();
        fs::write(&file, bytes).unwrap();
        audit(&file)
    };
    let right = r#"{"q_rope": "HTE", "k_rope": "KTE", "ffn_out": "DT"}"#;
    said(right).assert().code(0).stdout(contains("PARITY").and(contains("turner")));
    said(r#"{"q_rope": "HTE", "k_rope": "HTE"}"#).assert().code(2).stderr(contains("transpose"));
    said(r#"{"q_rope": "upside down"}"#).assert().code(2).stderr(contains("has no axes for q_rope"));
    said("HTE").assert().code(2).stderr(contains("`layout` of its __metadata__ is not understood"));
}

#[test]
fn what_cannot_be_read_gets_the_line_that_converts_it() {
    let (_dir, at) = folder();
    for (name, head, said) in [
        ("a.h5", &b"\x89HDF\r\n\x1a\n"[..], "h5py"),
        ("a.pkl", b"\x80\x04}.", "pickle.load"),
        ("old.pt", b"\x80\x02\x8a\nl\xfc\x9cF", "torch.save(torch.load"),
        ("a.json", b"{\"x\": [1, 2]}  ", "json.load"),
        ("m.gguf", b"GGUF\x03\0\0\0", "behind -m"),
        ("x.bin", b"abcdefghijkl", "np.savez"),
    ] {
        let path = at.join(name);
        fs::write(&path, head).unwrap();
        audit(&path).assert().code(2).stderr(contains(said));
    }
    fs::write(at.join("x.npy"), npy(&[1], &[1.0])).unwrap();
    audit(&at.join("x.npy")).assert().code(2).stderr(contains("a folder of .npy"));
    fs::create_dir(at.join("none")).unwrap();
    audit(&at.join("none"))
        .assert()
        .code(2)
        .stderr(contains("holds no dump").and(contains("parity_dump.save")));
}

fn ids_of(value: &toml::Value) -> Vec<String> {
    match value {
        toml::Value::String(id) => vec![id.clone()],
        toml::Value::Array(parts) => parts.iter().flat_map(ids_of).collect(),
        table => vec![table["id"].as_str().unwrap().to_owned()],
    }
}

#[test]
fn a_map_is_proposed_by_values_alone() {
    let (_dir, at) = folder();
    let (named, truth) = nameless();
    let (dump, map) = (at.join("dump.npz"), at.join("map.toml"));
    fs::write(&dump, npz(&named, &tokens(), false)).unwrap();
    let (spelt, into) = (dump.to_str().unwrap(), map.to_str().unwrap());
    let said = format!("{0} of {0} lines are sure; 0 tensors are no node", truth.len());
    parity(&["map", spelt, "-m", F16, "-o", into]).assert().code(0).stderr(contains(said));
    parity(&["map", spelt, "-m", F16, "-o", into]).assert().code(2).stderr(contains("is there already"));
    let found: toml::Table = fs::read_to_string(&map).unwrap().parse().unwrap();
    for (name, ids) in &truth {
        assert_eq!(&ids_of(&found[name]), ids, "{name}");
    }
    audit(&dump).args(["--names", into]).assert().code(0).stdout(contains("PARITY"));

    // Names of modules: one line for all layers, and it holds for a dump with a mistake in it.
    let hf = at.join("hf.npz");
    let renamed =
        as_hf().into_iter().map(|(name, tensor)| (name.replace("layers", "stage"), tensor)).collect();
    fs::write(&hf, npz(&renamed, &tokens(), false)).unwrap();
    let output =
        parity(&["map", hf.to_str().unwrap(), "-m", F16]).assert().code(0).get_output().stdout.clone();
    let text = String::from_utf8(output).unwrap();
    assert!(text.contains("\n\"model.stage.{n}.mlp.down_proj\" = \"blk.{n}.ffn_out\"\n"), "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#')).count();
    assert!(lines < 30, "a line for each kind of module: {text}");

    // A mistake from the third layer on: which lines that makes unsure is said, and why.
    let spoilt = as_hf().into_iter().map(|(name, tensor)| {
        let of_late = name.contains("layers.2.") || name.contains("layers.3.");
        (name.replace("layers", "stage"), if of_late { tensor.scaled(0.3) } else { tensor })
    });
    fs::write(&hf, npz(&spoilt.collect(), &tokens(), false)).unwrap();
    let why = "# unsure, model.stage.2.mlp.down_proj is near no node (";
    let taken = "and is taken for blk.2.ffn_out by its name";
    parity(&["map", hf.to_str().unwrap(), "-m", F16])
        .assert()
        .code(0)
        .stdout(contains(taken))
        .stderr(contains("lines are unsure"));
    let text = parity(&["map", hf.to_str().unwrap(), "-m", F16]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains(why), "{text}");

    let zeros = named.iter().map(|(name, tensor)| (name.clone(), tensor.scaled(0.0))).collect();
    fs::write(&dump, npz(&zeros, &tokens(), false)).unwrap();
    parity(&["map", spelt, "-m", F16])
        .assert()
        .code(2)
        .stderr(contains("holds nothing that this model computes"));
}

fn element(path: &Path) -> Element {
    let dump = parity::foreign::open(path, &Default::default()).unwrap();
    let id = dump.checkpoints().next().unwrap();
    dump.get(id).unwrap().parts()[0].element
}

#[test]
fn types_are_kept_as_they_are() {
    // Written by torch 2.15 itself: `embed` (2, 3) of bf16 as a view with strides, in a Parameter; `logits` of f16.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/foreign/typed.pt");
    assert_eq!(element(&path), Element::Bf16);
    let dump = parity::foreign::open(&path, &Default::default()).unwrap();
    assert_eq!(dump.tokens(), [5, 7]);
    assert_eq!(dump.gather("embed".parse().unwrap(), &[0, 1]).unwrap(), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
    assert_eq!(dump.gather("logits".parse().unwrap(), &[0, 1]).unwrap(), [0.5, 1.0, 1.5, 2.0]);
    assert_eq!(dump.gather("blk.0.q".parse().unwrap(), &[0, 1]).unwrap(), [1.0, -2.0]);
}
