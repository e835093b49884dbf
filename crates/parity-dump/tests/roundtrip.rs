//! What is written is what is read, whole or interrupted; and nothing on disk can make the reader panic.

use std::fs;

use parity_dump::{Checkpoint, Dump, Element, Kind, Producer, Writer};
use proptest::prelude::*;

const Q: Checkpoint = Checkpoint::layer(Kind::Q, 1);
const SCORES: Checkpoint = Checkpoint::layer(Kind::AttnScores, 0);
const LOGITS: Checkpoint = Checkpoint::global(Kind::Logits);

fn producer() -> Producer {
    Producer { name: "test".into(), ..Producer::default() }
}

/// Two steps: positions 0..3 and 3. The last layer's `logits` have only the last row of the first.
fn write(dir: &std::path::Path) -> Result<(), parity_dump::DumpError> {
    let mut writer = Writer::create(dir, producer(), Default::default())?;
    writer.begin_step(&[5, 6, 7], &[0, 1, 2], 3)?;
    writer.tensor_f32(Q, &[3, 1, 2], &[0., 1., 2., 3., 4., 5.])?;
    writer.tensor_f32(SCORES, &[1, 3, 3], &[0., 1., 2., 10., 11., 12., 20., 21., 22.])?;
    writer.tensor(LOGITS, Element::F16, &[1, 1], &half::f16::from_f32(2.5).to_le_bytes(), Some(&[2]))?;
    writer.end_step()?;
    writer.begin_step(&[8], &[3], 3)?;
    writer.tensor_f32(Q, &[1, 1, 2], &[6., 7.])?;
    writer.tensor_f32(LOGITS, &[1, 1], &[3.5])?;
    writer.end_step()?;
    writer.finish()
}

#[test]
fn rows_are_token_positions_over_all_steps() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path()).unwrap();
    let dump = Dump::open(dir.path()).unwrap();
    assert!(dump.manifest().complete);
    assert_eq!(dump.tokens(), [5, 6, 7, 8]);
    assert_eq!(dump.gather(Q, &[3, 1]).unwrap(), [6., 7., 2., 3.]);
    assert_eq!(dump.get(LOGITS).unwrap().positions().collect::<Vec<_>>(), [2, 3]);
    assert_eq!(dump.gather(LOGITS, &[2, 3]).unwrap(), [2.5, 3.5]);
    assert_eq!(dump.gather(LOGITS, &[0]), None);
    assert_eq!((dump.step_start(2), dump.step_start(3)), (0, 3));
}

/// Everything that need not be there may be null instead, and is then as if it were not there.
#[test]
fn null_is_as_not_there() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path()).unwrap();
    let path = dir.path().join("manifest.json");
    let whole: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let (mut null, mut absent) = (whole.clone(), whole);
    for field in ["model", "prompt", "graphs", "unmapped", "provenance"] {
        null[field] = serde_json::Value::Null;
        absent.as_object_mut().unwrap().remove(field);
    }
    for field in ["version", "backend", "device", "numerics"] {
        null["producer"][field] = serde_json::Value::Null;
        absent["producer"].as_object_mut().unwrap().remove(field);
    }
    let opened = |manifest: &serde_json::Value| {
        fs::write(&path, manifest.to_string()).unwrap();
        Dump::open(dir.path()).unwrap().manifest().clone()
    };
    let found = opened(&null);
    assert_eq!(found, opened(&absent));
    assert!(found.complete && found.rows.contains_key(&LOGITS));

    // Without `complete` the dump is an interrupted one, without `rows` a checkpoint has all rows of its steps.
    null["complete"] = serde_json::Value::Null;
    assert!(!opened(&null).complete);
    null["rows"] = serde_json::Value::Null;
    fs::write(&path, null.to_string()).unwrap();
    let error = Dump::open(dir.path()).err().unwrap().to_string();
    assert!(error.contains("logits"), "the tensor has one row of the three: {error}");
}

#[test]
fn attention_rows_end_at_their_own_position() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path()).unwrap();
    let dump = Dump::open(dir.path()).unwrap();
    let mut row = Vec::new();
    dump.row(dump.get(SCORES).unwrap(), 1, &mut row);
    assert_eq!(row, [10., 11.]);
}

/// One file of four positions: Q, scores of two heads, tokens; `steps` in its metadata.
fn single(path: &std::path::Path, steps: Option<&str>) {
    use safetensors::tensor::{Dtype, TensorView};
    let bytes = |values: Vec<f32>| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let tokens: Vec<u8> = [5i32, 6, 7, 8].iter().flat_map(|x| x.to_le_bytes()).collect();
    let (q, scores) = (bytes((0..8).map(|i| i as f32).collect()), bytes((0..32).map(|i| i as f32).collect()));
    let views = [
        ("blk.1.q", TensorView::new(Dtype::F32, vec![4, 1, 2], &q).unwrap()),
        ("blk.0.attn_scores", TensorView::new(Dtype::F32, vec![2, 4, 4], &scores).unwrap()),
        ("tokens", TensorView::new(Dtype::I32, vec![4], &tokens).unwrap()),
    ];
    let metadata = steps.map(|steps| [("steps".to_owned(), steps.to_owned())].into_iter().collect());
    fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
}

#[test]
fn a_single_file_says_its_steps() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.safetensors");
    single(&path, None);
    assert_eq!(Dump::open(&path).unwrap().manifest().steps.len(), 1);
    single(&path, Some("[2, 1, 1]"));
    let dump = Dump::open(&path).unwrap();
    let positions: Vec<_> = dump.manifest().steps.iter().map(|step| step.positions.clone()).collect();
    assert_eq!(positions, [vec![0, 1], vec![2], vec![3]]);
    assert_eq!(dump.gather(Q, &[0, 2, 3]).unwrap(), [0., 1., 4., 5., 6., 7.]);
    assert_eq!(dump.in_step(0, Q).unwrap(), (vec![2, 1, 2], vec![0, 1], vec![0., 1., 2., 3.]));
    assert_eq!(dump.in_step(2, Q).unwrap(), (vec![1, 1, 2], vec![3], vec![6., 7.]));
    // (H, T, S): the rows of a step lie apart.
    let (shape, _, values) = dump.in_step(1, SCORES).unwrap();
    assert_eq!((shape, values), (vec![2, 1, 4], vec![8., 9., 10., 11., 24., 25., 26., 27.]));
    let mut row = Vec::new();
    dump.row(dump.get(SCORES).unwrap(), 2, &mut row);
    assert_eq!(row, [8., 9., 10., 24., 25., 26.]);
    for wrong in ["[2, 1]", "[4, 0]", "[2, 2, 1]", "2,1,1", "[18446744073709551615, 5]", "[-1, 5]"] {
        single(&path, Some(wrong));
        let error = Dump::open(&path).err().unwrap().to_string();
        assert!(error.contains("[5, 1, 1]") && error.contains("`steps`"), "{wrong}: {error}");
    }
}

#[test]
fn heads_in_halves_are_read_in_pairs() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(dir.path(), producer(), Default::default()).unwrap();
    writer.begin_step(&[5], &[0], 2).unwrap();
    writer.tensor_f32(Q, &[1, 2, 4], &[0., 1., 2., 3., 4., 5., 6., 7.]).unwrap();
    writer.tensor_f32(LOGITS, &[1, 4], &[0., 1., 2., 3.]).unwrap();
    writer.end_step().unwrap();
    writer.finish().unwrap();
    let mut dump = Dump::open(dir.path()).unwrap();
    dump.read_halves_as_pairs(4, |checkpoint| checkpoint == Q);
    let paired = [0., 2., 1., 3., 4., 6., 5., 7.];
    assert_eq!(dump.gather(Q, &[0]).unwrap(), paired);
    assert_eq!(dump.in_step(0, Q).unwrap().2, paired);
    assert_eq!(dump.gather(LOGITS, &[0]).unwrap(), [0., 1., 2., 3.]);
}

#[test]
fn an_interrupted_dump_keeps_its_finished_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(dir.path(), producer(), Default::default()).unwrap();
    writer.begin_step(&[5], &[0], 1).unwrap();
    writer.tensor_f32(Q, &[1, 1, 2], &[0., 1.]).unwrap();
    writer.end_step().unwrap();
    writer.begin_step(&[6], &[1], 1).unwrap();
    drop(writer);
    let dump = Dump::open(dir.path()).unwrap();
    assert!(!dump.manifest().complete);
    assert_eq!(dump.gather(Q, &[0]).unwrap(), [0., 1.]);
}

#[test]
fn a_dump_that_stopped_says_where_and_is_never_complete() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(dir.path(), producer(), Default::default()).unwrap();
    writer.begin_step(&[5, 6], &[0, 1], 1).unwrap();
    writer.tensor_f32(Q, &[2, 1, 2], &[0., 1., 2., 3.]).unwrap();
    writer.end_step().unwrap();
    writer.begin_step(&[7], &[2], 1).unwrap();
    writer.stop("the context was shifted").unwrap();
    let stopped = || Dump::open(dir.path()).unwrap().manifest().stopped.clone().unwrap();
    assert_eq!((stopped().after_step, stopped().position), (Some(0), Some(3)));
    // The first reason counts.
    writer.stop("the disk is full").unwrap();
    writer.finish().unwrap();
    assert_eq!(stopped().reason, "the context was shifted");
    assert!(!Dump::open(dir.path()).unwrap().manifest().complete);
}

#[test]
fn a_folder_with_other_files_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.tex"), "years of work").unwrap();
    assert!(Writer::create(dir.path(), producer(), Default::default()).is_err());
    assert!(dir.path().join("thesis.tex").exists());
}

#[test]
fn dumps_of_other_contexts_go_with_the_one_that_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("context-1");
    write(dir.path()).unwrap();
    write(&other).unwrap();
    fs::write(other.join("notes.txt"), "mine").unwrap();
    let error = Writer::create(dir.path(), producer(), Default::default()).err().unwrap().to_string();
    assert!(error.contains("`notes.txt` in it"), "{error}");
    assert!(other.join("manifest.json").exists() && dir.path().join("manifest.json").exists());
    fs::remove_file(other.join("notes.txt")).unwrap();
    write(dir.path()).unwrap();
    assert!(!other.exists());
}

#[test]
fn a_shape_that_does_not_fit_the_positions_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path()).unwrap();
    let path = dir.path().join("manifest.json");
    let mut manifest: parity_dump::Manifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest.steps[0].positions.pop();
    fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
    let error = Dump::open(dir.path()).err().expect("the shape is wrong");
    assert!(error.to_string().contains("wrong number of token rows"), "{error}");
}

proptest! {
    #[test]
    fn no_damage_makes_the_reader_panic(file in 0usize..3, at in 0usize..4000, byte: u8, cut: bool) {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path()).unwrap();
        let name = ["manifest.json", "step-0000.safetensors", "step-0001.safetensors"][file];
        let path = dir.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        let at = at % bytes.len();
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        fs::write(&path, bytes).unwrap();
        if let Ok(dump) = Dump::open(dir.path()) {
            let mut row = Vec::new();
            for checkpoint in dump.checkpoints() {
                let recorded = dump.get(checkpoint).unwrap();
                for index in 0..recorded.len() {
                    dump.row(recorded, index, &mut row);
                }
            }
        }
    }
}

/// One file of three rows and one row of two steps, with this `__metadata__`.
fn told(dir: &std::path::Path, said: &[(&str, &str)]) -> std::path::PathBuf {
    use safetensors::tensor::{Dtype, TensorView};
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let tokens: Vec<u8> = [5u32, 6, 7, 8].iter().flat_map(|token| token.to_le_bytes()).collect();
    let (q, logits) = (bytes(&[0., 1., 2., 3., 4., 5., 6., 7.]), bytes(&[2.5, 3.5]));
    let tensors = [
        ("tokens", TensorView::new(Dtype::U32, vec![4], &tokens).unwrap()),
        ("blk.1.q", TensorView::new(Dtype::F32, vec![4, 1, 2], &q).unwrap()),
        ("logits", TensorView::new(Dtype::F32, vec![2, 1], &logits).unwrap()),
    ];
    let said = said.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let path = dir.join("dump.safetensors");
    fs::write(&path, safetensors::serialize(tensors, Some(said)).unwrap()).unwrap();
    path
}

#[test]
fn a_single_file_says_what_a_folder_says() {
    let dir = tempfile::tempdir().unwrap();
    let steps = r#"[{"positions":[0,1,2]},{"positions":[3]}]"#;
    let producer = r#"{"name":"mine","version":"2","numerics":"f32"}"#;
    let rows = r#"{"logits":[2,3]}"#;
    let said = [
        ("steps", steps),
        ("producer", producer),
        ("numerics", "bf16 storage=bf16"),
        ("rows", rows),
        ("format", "pt"),
    ];
    let dump = Dump::open(&told(dir.path(), &said)).unwrap();
    assert_eq!(dump.manifest().producer.name, "mine");
    assert_eq!(dump.manifest().producer.version.as_deref(), Some("2"));
    assert_eq!(dump.manifest().producer.numerics.as_deref(), Some("bf16 storage=bf16"));
    assert_eq!(dump.gather(Q, &[3, 1]).unwrap(), [6., 7., 2., 3.]);
    assert_eq!(dump.get(LOGITS).unwrap().positions().collect::<Vec<_>>(), [2, 3]);
    assert_eq!((dump.step_start(2), dump.step_start(3)), (0, 3));
    assert_eq!(dump.in_step(1, Q).unwrap(), (vec![1, 1, 2], vec![3], vec![6., 7.]));
    assert_eq!(dump.in_step(0, LOGITS).unwrap(), (vec![1, 1], vec![2], vec![2.5]));
    // A name alone, and one step of all tokens where nothing else is said.
    let dump = Dump::open(&told(dir.path(), &[("producer", "mine"), ("rows", rows)])).unwrap();
    assert_eq!((dump.manifest().producer.name.as_str(), dump.manifest().steps.len()), ("mine", 1));
}

#[test]
fn what_a_single_file_says_wrongly_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |said: &[(&str, &str)], part: &str| {
        let error = Dump::open(&told(dir.path(), said)).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    };
    let rows = ("rows", r#"{"logits":[2,3]}"#);
    refused(&[rows, ("steps", "[0,1]")], "`steps`");
    refused(&[rows, ("steps", r#"[{"positions":[0,1,2,9]}]"#)], "without a token");
    refused(&[rows, ("steps", r#"[{"positions":[0,1]}]"#)], "token rows");
    refused(&[rows, ("steps", "[]")], "token rows");
    refused(&[rows, ("producer", "{\"name\": 3}")], "`producer`");
    refused(&[("rows", r#"{"logits":2}"#)], "`rows`");
}

/// Many tensors of several blocks, so that cores take them in turn; one that does not shrink stays as it is.
#[cfg(feature = "zstd")]
#[test]
fn a_packed_dump_is_read_as_the_plain_one() {
    let dir = tempfile::tempdir().unwrap();
    let noise: Vec<f32> =
        (0u32..97_000).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761) & 0xbfff_ffff)).collect();
    let smooth: Vec<f32> = (0..97_000).map(|i| (i as f32).sin()).collect();
    let mut writer = Writer::create(dir.path(), producer(), Default::default()).unwrap();
    writer.begin_step(&[5], &[0], 9).unwrap();
    for layer in 0..9 {
        let values = if layer == 4 { &noise } else { &smooth };
        writer
            .tensor_f32(
                Checkpoint::layer(Kind::FfnUp, layer),
                &[1, 97_000 - layer as usize],
                &values[layer as usize..],
            )
            .unwrap();
    }
    writer.end_step().unwrap();
    writer.finish().unwrap();
    let read = || {
        let dump = Dump::open(dir.path())?;
        Ok((0..9).map(|l| dump.gather(Checkpoint::layer(Kind::FfnUp, l), &[0]).unwrap()).collect::<Vec<_>>())
    };
    let plain = read().map_err(|e: parity_dump::DumpError| e.to_string()).unwrap();
    let [before, after] = parity_dump::packed::pack_folder(dir.path()).unwrap();
    assert!(after < before);
    assert!(read().map_err(|e: parity_dump::DumpError| e.to_string()).unwrap() == plain);
    // A byte of a frame's magic number: the tensor is named.
    let step = dir.path().join("step-0000.safetensors");
    let mut bytes = fs::read(&step).unwrap();
    let magic = bytes.windows(4).position(|w| w == [0x28, 0xb5, 0x2f, 0xfd]).unwrap();
    bytes[magic] ^= 1;
    fs::write(&step, bytes).unwrap();
    let error = read().unwrap_err().to_string();
    assert!(error.contains("ffn_up") && error.contains("cannot be unpacked"), "{error}");
}
