//! Queries, keys and values that a recording cuts out of one matmul's result are compared with that.

use std::collections::HashMap;
use std::path::Path;

use parity::arithmetic::Arithmetic;
use parity::engine::op_by_op::Machine;
use parity::gguf::Gguf;
use parity::model::builders::{Shape, build, inputs};
use parity_graph::text;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::support::graphs::record::{How, Step, writer};
use crate::support::graphs::{fill, filled, head, recorded};
use crate::support::program::audit;

const ARCH: &str = "gptneox-dense";
/// What is cut out of what, in which columns of rows.
const PARTS: [(&str, &str, [usize; 2]); 6] = [
    ("q", "wqkv_b", [0, 256]),
    ("k", "wqkv_b", [256, 512]),
    ("v", "wqkv_b", [512, 768]),
    ("q_proj", "attn_qkv", [0, 256]),
    ("k_proj", "attn_qkv", [256, 512]),
    ("v_proj", "attn_qkv", [512, 768]),
];

/// A recording of a graph whose inputs are those of another architecture.
fn record(model: &Path, dump: &Path) {
    fill(&head(ARCH), model);
    let (graph, other, gguf) = (recorded(ARCH, ""), filled("llama-dense"), Gguf::open(model).unwrap());
    let tokens: Vec<u32> = vec![1, 17, 33, 42, 5, 99, 101, 7, 64, 12, 88, 3];
    let given = inputs(&build(&other, Shape::of(&graph)).unwrap(), &tokens, 0).unwrap();
    let mut writer = writer(model, dump, "llama.cpp");
    let number = Some(writer.graph(&text::write(&graph)).unwrap());
    let step = Step { tokens: &tokens, first: 0, graph: &graph, number, given: &given };
    let how = How::healthy();
    step.record(&mut Machine::<f64>::new(&gguf, Arithmetic::EXACT), &mut writer, &how);
    writer.finish().unwrap();
}

/// Adds the parts, each with what is done to its values, row by row.
fn cut_out(dump: &Path, spoil: impl Fn(&str, &mut [Vec<f32>])) {
    let path = dump.join("step-0000.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    for layer in 0..2 {
        for (part, whole, [from, to]) in PARTS {
            let whole = file.tensor(&format!("blk.{layer}.{whole}")).unwrap();
            let values: Vec<f32> =
                whole.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
            let mut rows: Vec<Vec<f32>> =
                values.chunks(whole.shape()[1]).map(|row| row[from..to].to_vec()).collect();
            let id = format!("blk.{layer}.{part}");
            spoil(&id, &mut rows);
            let bytes = rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
            all.insert(id, (Dtype::F32, vec![rows.len(), to - from], bytes));
        }
    }
    let views = all.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let bytes = serialize(views, None).unwrap();
    std::fs::write(&path, bytes).unwrap();
}

/// What is done to the rows of a tensor.
type Spoiling = fn(&mut [Vec<f32>]);

#[test]
fn parts_of_a_fused_matmul_are_what_they_are_cut_out_of() {
    let folder = tempfile::tempdir().unwrap();
    let (model, dump) = (folder.path().join("model.gguf"), folder.path().join("dump"));
    let spoilings: [(&str, &str, Spoiling); 5] = [
        ("", "", |_| {}),
        ("doubled", "blk.1.v", |rows| rows[7].iter_mut().for_each(|x| *x *= 2.0)),
        ("scaled", "blk.0.k", |rows| rows.iter_mut().flatten().for_each(|x| *x *= 1.001)),
        ("exchanged", "blk.0.q", |rows| rows.swap(3, 4)),
        ("one value", "blk.1.v_proj", |rows| rows[11][255] += 1e-3),
    ];
    for (name, id, spoil) in spoilings {
        let _ = std::fs::remove_dir_all(&dump);
        record(&model, &dump);
        cut_out(&dump, |part, rows| {
            if part == id {
                spoil(rows);
            }
        });
        let audited = audit(&dump, &model, &["--allow-missing"]);
        let code = i32::from(!id.is_empty());
        assert_eq!((audited.code, &audited.first[..]), (code, id), "{name}: {}", audited.report["reason"]);
        assert!(!audited.notes.contains("nobody looked at"), "{}", audited.notes);
        let part = |id: &str| {
            let all = audited.report["checkpoints"].as_array().unwrap();
            all.iter()
                .find(|entry| entry["id"] == id)
                .is_some_and(|entry| !entry["local"]["candidate"].is_null())
        };
        assert!(part("blk.1.k") && part("blk.0.q_proj"));
    }
}
