//! The barriers of the kernels, and waits for what runs on beside them: without any one of them, a test must fail.

use std::fs;
use std::path::Path;

use parity::engine::RowStats;
use parity::engine::cuda::calls::{
    self, AttentionData, AttentionKernel, Call, LinearData, LinearKernel, NormFirst, NormShape, StatsPair,
};
use parity::engine::fused::graph::{Attention, BySteps, Mask, NormStyle};
use parity::gguf::DType;
use parity::numerics::Storage;

use crate::data::{Memory, Random, RandomWeight};
use crate::host::{self, Kernels};
use crate::linear::{alone, data_for, plain};
use crate::samples::sample;

/// What waits for other threads of a block or of a cluster, for products of warpgroups, and for what a step needs.
const WAITS: [&str; 5] =
    ["__syncthreads();", "  cluster_wait();", "products_wait<0>();", "products_wait<1>();", ".wait(parity);"];
/// Orders of the threads to look for a difference in.
const SEEDS: std::ops::Range<u32> = 1..9;

/// A kernel that a file's barriers are there for.
struct Subject {
    /// Where the barriers stand.
    file: &'static str,
    /// What to compile: the kernel's file.
    unit: &'static str,
    calls: Vec<Call>,
    out: Memory,
    /// Inputs, kept alive.
    _inputs: Vec<Memory>,
    _weight: Option<RandomWeight>,
}

fn norm() -> Subject {
    let (groups, width) = (2, 96);
    let inputs =
        vec![Memory::of_f32(&Random(1).values(groups * width)), Memory::of_f32(&Random(2).values(width))];
    let out = Memory::room(groups * width, Storage::F32);
    let centred = calls::norm_style(NormStyle { centred: true, ..NormStyle::RMS });
    let shape = NormShape { groups, width, eps: 1e-6, style: centred.unwrap() };
    let call = calls::norm(inputs[0].address(), inputs[1].address(), out.address(), shape, Storage::F32);
    Subject { file: "common.cuh", unit: "norm.cu", calls: vec![call], out, _inputs: inputs, _weight: None }
}

fn linear(file: &'static str, kernel: LinearKernel, storage: Storage) -> Subject {
    let (rows, outputs, columns) = (65, 9, 512);
    let weight = RandomWeight::new(&mut Random(3), DType::F16, outputs, columns);
    let inputs = vec![Memory::stored(&Random(4).values(rows * columns), storage)];
    let out = Memory::room(rows * outputs, storage);
    let addresses = [inputs[0].address(), out.address()];
    let call = plain(&weight.weight, kernel, addresses, rows, storage);
    Subject { file, unit: file, calls: vec![call], out, _inputs: inputs, _weight: Some(weight) }
}

/// In every shape, whose blocks take their steps by turns and bring one another's tiles: one step alone, where sums lie where
/// its tiles were; and more than fit at once.
fn warpgroups(steps: usize) -> Subject {
    let (rows, outputs, columns) = (65, 75, 64 * steps);
    let weight = RandomWeight::new(&mut Random(3), DType::F16, outputs, columns);
    let inputs = vec![Memory::stored(&Random(4).values(rows * columns), Storage::F16)];
    let data = data_for(LinearKernel::Warpgroup, inputs[0].address(), rows, Storage::F16);
    let calls_into = |out| calls::linear_in_every_shape(&[alone(&weight.weight, out)], data);
    let shapes = calls_into(0).len();
    let out = Memory::room(shapes * rows * outputs, Storage::F16);
    let own =
        |shape: usize| calls_into(out.address() + (2 * shape * rows * outputs) as u64).swap_remove(shape);
    let calls = (0..shapes).map(own).collect();
    let file = "linear_warpgroup.cu";
    Subject { file, unit: file, calls, out, _inputs: inputs, _weight: Some(weight) }
}

/// Two warps share each tile, and the norm of the row; the last tile shares outputs with the one before it.
fn linear_one() -> Subject {
    let (outputs, columns) = (25, 512);
    let weight = RandomWeight::new(&mut Random(3), DType::Q4_K, outputs, columns);
    let inputs = vec![
        Memory::stored(&Random(4).values(columns), Storage::F16),
        Memory::of_f32(&Random(5).values(columns)),
        Memory::room(columns, Storage::F16),
    ];
    let out = Memory::room(outputs, Storage::F16);
    let [x, norm_weight, normed] = [0, 1, 2].map(|i: usize| inputs[i].address());
    let norm = NormFirst { weight: norm_weight, out: normed, eps: 1e-6 };
    let data = LinearData { norm: Some(norm), ..data_for(LinearKernel::One, x, 1, Storage::F16) };
    let file = "linear_one.cu";
    let calls = vec![calls::linear(&[alone(&weight.weight, out.address())], data)];
    assert!(calls[0].kernel.starts_with("linear_one"), "{}", calls[0].kernel);
    Subject { file, unit: file, calls, out, _inputs: inputs, _weight: Some(weight) }
}

/// The token goes to a new position every time, where it stands already.
fn next_token() -> Subject {
    let (vocab, largest) = (5003, 4000u32);
    let mut logits = Random(8).values(vocab);
    logits[largest as usize] = 40.0;
    let room = Memory::of_bytes(&[0; calls::NEXT_ROOM]);
    let inputs = vec![Memory::of_f32(&logits), Memory::of_bytes(&[0; 8]), room];
    let out = Memory::of_bytes(&largest.to_le_bytes().repeat(64));
    let [logits, step, room] = [0, 1, 2].map(|i: usize| inputs[i].address());
    let call = calls::next_token(logits, step, out.address(), room, vocab);
    Subject { file: "next.cu", unit: "next.cu", calls: vec![call], out, _inputs: inputs, _weight: None }
}

/// A row so wide that all warps of a block share it.
fn stats() -> Subject {
    let width = 16_384;
    let inputs = vec![Memory::of_f32(&Random(6).values(width)), Memory::of_f32(&Random(7).values(width))];
    let out = Memory::of_bytes(&vec![0; size_of::<RowStats>()]);
    let [a, b] = [0, 1].map(|i: usize| inputs[i].address());
    let pair = StatsPair { a, b, width, storage: Storage::F32, places: 0, shown: 0 };
    let calls = vec![calls::stats(&[pair], 1, out.address())];
    Subject { file: "stats.cu", unit: "stats.cu", calls, out, _inputs: inputs, _weight: None }
}

/// What shows a missing barrier: the probabilities, of stored scores, where the kernel has a barrier for those.
fn attention(file: &'static str, kernel: AttentionKernel, storage: Storage) -> Subject {
    // On tensor cores each of two groups takes 64 positions at a time into two buffers: the last lot of the first group
    // meets what may still be read.
    let rows = if kernel == AttentionKernel::Mma { 264 } else { 72 };
    let op = Attention {
        heads: 1,
        kv_heads: 1,
        head_width: 32,
        scale: 1.0,
        group: 1,
        mask: BySteps::all(Mask::CAUSAL),
        softmax: true,
        limit: parity::engine::fused::graph::ScoreLimit::None,
    };
    let x = Memory::stored(&Random(5).values(rows * 32), storage);
    let matrices = [0; 2].map(|_| Memory::room(rows * rows, Storage::F32));
    let out = Memory::room(rows * 32, storage);
    let (q, first) = (x.address(), Memory::of_bytes(&[0; 4]));
    let [scores, probs] = [matrices[0].address(), matrices[1].address()];
    let (room, capacity) = (0, 0);
    let data = AttentionData {
        q,
        k: q,
        v: q,
        out: out.address(),
        scores,
        probs,
        first: first.address(),
        room,
        capacity,
    };
    let call = calls::attention(&op, data, kernel, rows, [storage; 2]).unwrap();
    let [scores, probs] = matrices;
    let (out, other) = if kernel == AttentionKernel::Mma { (probs, out) } else { (out, probs) };
    Subject {
        file,
        unit: file,
        calls: vec![call],
        out,
        _inputs: vec![x, first, scores, other],
        _weight: None,
    }
}

/// A row of two blocks, whose sums are merged, and a row of one, which stores probabilities of its own scores.
fn attention_few() -> Subject {
    let op = Attention {
        heads: 1,
        kv_heads: 1,
        head_width: 64,
        scale: 1.0,
        group: 1,
        mask: BySteps::all(Mask::CAUSAL),
        softmax: true,
        limit: parity::engine::fused::graph::ScoreLimit::None,
    };
    let cached = [301, 41];
    let x = Memory::stored(&Random(5).values(cached[0] * 64), Storage::F16);
    let firsts = cached.map(|cached| Memory::of_bytes(&(cached as i32 - 1).to_le_bytes()));
    let scores = Memory::room(cached[0], Storage::F32);
    let room = Memory::of_bytes(&vec![0; calls::attention_room(1, 64, cached[0])]);
    let context = Memory::room(64, Storage::F16);
    let out = Memory::room(cached[0] + cached[1], Storage::F32);
    let call = |i: usize| {
        let data = AttentionData {
            q: x.address(),
            k: x.address(),
            v: x.address(),
            out: context.address(),
            scores: scores.address(),
            probs: out.address() + (4 * i * cached[0]) as u64,
            first: firsts[i].address(),
            room: room.address(),
            capacity: cached[0],
        };
        calls::attention(&op, data, AttentionKernel::Few, 1, [Storage::F16; 2]).unwrap()
    };
    let calls = vec![call(0), call(1)];
    let [one, two] = firsts;
    let file = "attention_few.cu";
    let inputs = vec![x, one, two, scores, room, context];
    Subject { file, unit: file, calls, out, _inputs: inputs, _weight: None }
}

impl Subject {
    /// The bits of the result in one order of the threads, or why the kernel did not end.
    fn result(&self, kernels: &Kernels, seed: u32) -> Result<Vec<u8>, String> {
        self.calls.iter().try_for_each(|call| kernels.run(call, seed))?;
        Ok(self.out.bytes().to_vec())
    }
}

/// Where what waits stands in a text.
fn waits(text: &str) -> Vec<(usize, &'static str)> {
    WAITS.into_iter().flat_map(|wait| text.match_indices(wait).map(move |(at, _)| (at, wait))).collect()
}

/// The kernels' folder with one wait of `file` taken out, and only `unit` compiled.
fn mutant(folder: &Path, subject: &Subject, (at, wait): (usize, &str)) {
    fs::create_dir_all(folder.join("host")).unwrap();
    for entry in
        fs::read_dir(host::folder()).unwrap().chain(fs::read_dir(host::folder().join("host")).unwrap())
    {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, folder.join(path.strip_prefix(host::folder()).unwrap())).unwrap();
        }
    }
    fs::write(folder.join("all.cu"), format!("#include \"{}\"\n", subject.unit)).unwrap();
    let text = fs::read_to_string(host::folder().join(subject.file)).unwrap();
    let without = format!("{};{}", &text[..at], &text[at + wait.len()..]);
    fs::write(folder.join(subject.file), without).unwrap();
}

/// Without any one of the waits of a file, or some of them in a sample, one of its kernels gives other results.
fn needs_its_waits(subjects: &[Subject]) {
    let Some(kernels) = host::kernels() else { return };
    if matches!(kernels, Kernels::Gpu) {
        return; // mutants are for the CPU; on a GPU the race checker looks for missing barriers
    }
    let file = subjects[0].file;
    let healthy: Vec<Vec<u8>> = subjects.iter().map(|subject| subject.result(kernels, 0).unwrap()).collect();
    let unlike = |kernels: &Kernels, seed: u32| {
        let unlike =
            |(subject, healthy): (&Subject, _)| subject.result(kernels, seed).as_ref() != Ok(healthy);
        subjects.iter().zip(&healthy).any(unlike)
    };
    for seed in sample("orders of the threads", 2, SEEDS) {
        assert!(!unlike(kernels, seed), "{file}, order {seed}");
    }
    let text = fs::read_to_string(host::folder().join(file)).unwrap();
    for (at, wait) in sample("waits", 1, waits(&text)) {
        let folder = tempfile::tempdir().unwrap();
        mutant(folder.path(), &subjects[0], (at, wait));
        let kernels = Kernels::build(folder.path(), &folder.path().join("kernels.so")).unwrap();
        let seen = SEEDS.into_iter().any(|seed| unlike(&kernels, seed));
        let line = text[..at].lines().count();
        assert!(seen, "{file}:{line} without `{wait}` gives the same results");
    }
}

/// A test of each file whose kernels wait, and one that there is no other such file.
macro_rules! files {
    ($($name:ident: $file:literal [$($subject:expr),+];)+) => {
        $(#[test]
        fn $name() {
            let subjects = [$($subject),+];
            assert!(subjects.iter().all(|subject| subject.file == $file));
            needs_its_waits(&subjects);
        })+

        #[test]
        fn every_file_that_waits_is_here() {
            let files = [$($file),+];
            for entry in fs::read_dir(host::folder()).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap();
                let waits =
                    path.is_file() && fs::read_to_string(&path).is_ok_and(|text| !waits(&text).is_empty());
                assert!(!waits || files.contains(&name), "no test takes the barriers of {name} out");
            }
        }
    };
}

files! {
    sums_of_a_block_wait: "common.cuh" [norm()];
    linear_row_waits: "linear_row.cu" [linear("linear_row.cu", LinearKernel::Row, Storage::F32)];
    linear_tile_waits: "linear_tile.cu" [linear("linear_tile.cu", LinearKernel::Tile, Storage::F32)];
    linear_split_waits: "linear_split.cu" [linear("linear_split.cu", LinearKernel::Split, Storage::F32)];
    linear_mma_waits: "linear_mma.cu" [linear("linear_mma.cu", LinearKernel::Tile, Storage::F16)];
    linear_few_waits: "linear_few.cu" [linear("linear_few.cu", LinearKernel::Few, Storage::F16)];
    linear_one_waits: "linear_one.cu" [linear_one()];
    linear_wide_waits: "linear_wide.cu" [linear("linear_wide.cu", LinearKernel::Wide, Storage::F16)];
    linear_warpgroup_waits: "linear_warpgroup.cu" [warpgroups(1), warpgroups(21)];
    stats_wait: "stats.cu" [stats()];
    attention_waits: "attention.cu" [attention("attention.cu", AttentionKernel::Tile, Storage::F32)];
    attention_few_waits: "attention_few.cu" [attention_few()];
    attention_mma_waits: "attention_mma.cu" [attention("attention_mma.cu", AttentionKernel::Mma, Storage::F16)];
    next_waits: "next.cu" [next_token()];
}
