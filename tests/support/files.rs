//! Files as numpy, torch and safetensors write them.

use std::collections::BTreeMap;
use std::io::{Cursor, Write};
use std::ops::Range;

use safetensors::tensor::{Dtype, TensorView, serialize};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Values in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Tensor {
    /// With a leading axis of one entry.
    pub fn batched(mut self) -> Tensor {
        self.shape.insert(0, 1);
        self
    }

    /// (T, H·E) of (T, H, E).
    pub fn flat(&self) -> Tensor {
        let width = self.shape[1..].iter().product();
        Tensor { shape: vec![self.shape[0], width], values: self.values.clone() }
    }

    pub fn scaled(&self, by: f32) -> Tensor {
        Tensor { shape: self.shape.clone(), values: self.values.iter().map(|x| x * by).collect() }
    }

    /// Each value with that of another tensor of this shape.
    pub fn with(&self, other: &Tensor, of: impl Fn(f32, f32) -> f32) -> Tensor {
        let values = self.values.iter().zip(&other.values).map(|(a, b)| of(*a, *b)).collect();
        Tensor { shape: self.shape.clone(), values }
    }

    /// One of two summands, whose sum is exact: the upper halves of the values, and what is left.
    pub fn summand(&self, which: usize) -> Tensor {
        let upper = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        let of = |x: &f32| if which == 0 { upper(*x) } else { x - upper(*x) };
        Tensor { shape: self.shape.clone(), values: self.values.iter().map(of).collect() }
    }

    /// Rows of the first axis.
    pub fn rows(&self, rows: Range<usize>) -> Tensor {
        let width: usize = self.shape[1..].iter().product();
        let shape = [vec![rows.len()], self.shape[1..].to_vec()].concat();
        Tensor { shape, values: self.values[rows.start * width..rows.end * width].to_vec() }
    }

    /// Axis i is axis `order[i]` of this one.
    pub fn permuted(&self, order: &[usize]) -> Tensor {
        let shape: Vec<usize> = order.iter().map(|&axis| self.shape[axis]).collect();
        let mut values = Vec::with_capacity(self.values.len());
        for index in 0..self.values.len() {
            let (mut rest, mut at) = (index, vec![0; order.len()]);
            for i in (0..order.len()).rev() {
                at[order[i]] = rest % shape[i];
                rest /= shape[i];
            }
            values.push(self.values[at.iter().zip(&self.shape).fold(0, |sum, (i, extent)| sum * extent + i)]);
        }
        Tensor { shape, values }
    }

    /// Columns of several, side by side.
    pub fn beside(parts: &[Tensor]) -> Tensor {
        let rows = parts[0].shape[0];
        let mut values = Vec::new();
        for row in 0..rows {
            parts.iter().for_each(|part| values.extend(part.rows(row..row + 1).values));
        }
        Tensor { shape: vec![rows, values.len() / rows], values }
    }

    /// Columns of several, in turn.
    pub fn woven(parts: &[Tensor]) -> Tensor {
        let shape = vec![parts[0].shape[0], parts[0].shape[1] * parts.len()];
        let values =
            (0..parts[0].values.len()).flat_map(|i| parts.iter().map(move |part| part.values[i])).collect();
        Tensor { shape, values }
    }

    /// One of two halves along the axis behind the tokens.
    pub fn half(&self, which: usize) -> Tensor {
        let row: usize = self.shape[1..].iter().product();
        let mut shape = self.shape.clone();
        shape[1] /= 2;
        let part = row / 2;
        let values =
            self.values.chunks(row).flat_map(|row| row[which * part..(which + 1) * part].to_vec()).collect();
        Tensor { shape, values }
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub fn safetensors(tensors: &BTreeMap<String, Tensor>, tokens: &[i64]) -> Vec<u8> {
    let ids: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let data: Vec<(&String, &Tensor, Vec<u8>)> =
        tensors.iter().map(|(name, tensor)| (name, tensor, bytes_of(&tensor.values))).collect();
    let mut views = vec![("input_ids", TensorView::new(Dtype::I64, vec![1, tokens.len()], &ids).unwrap())];
    for (name, tensor, bytes) in &data {
        views.push((name, TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).unwrap()));
    }
    serialize(views, None).unwrap()
}

fn npy_of(descr: &str, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let extents: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({extents}), }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\0".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

pub fn npy(shape: &[usize], values: &[f32]) -> Vec<u8> {
    npy_of("<f4", shape, &bytes_of(values))
}

fn archive(entries: Vec<(String, Vec<u8>)>, packed: bool) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let method = if packed { CompressionMethod::Deflated } else { CompressionMethod::Stored };
    for (name, bytes) in entries {
        zip.start_file(name, SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(&bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

pub fn npz(tensors: &BTreeMap<String, Tensor>, tokens: &[i64], packed: bool) -> Vec<u8> {
    let ids: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let mut entries = vec![("input_ids.npy".to_owned(), npy_of("<i8", &[tokens.len()], &ids))];
    entries.extend(
        tensors.iter().map(|(name, tensor)| (format!("{name}.npy"), npy(&tensor.shape, &tensor.values))),
    );
    archive(entries, packed)
}

/// A pickle of a dictionary of tensors, as torch writes it (protocol 2).
struct Pickle {
    text: Vec<u8>,
    entries: Vec<(String, Vec<u8>)>,
}

impl Pickle {
    fn new() -> Pickle {
        Pickle { text: b"\x80\x02}(".to_vec(), entries: Vec::new() }
    }

    fn string(&mut self, text: &str) {
        self.text.push(b'X');
        self.text.extend((text.len() as u32).to_le_bytes());
        self.text.extend(text.as_bytes());
    }

    fn number(&mut self, number: usize) {
        self.text.push(b'J');
        self.text.extend((number as u32).to_le_bytes());
    }

    fn counts(&mut self, counts: &[usize]) {
        self.text.push(b'(');
        counts.iter().for_each(|&count| self.number(count));
        self.text.push(b't');
    }

    fn tensor(&mut self, name: &str, storage: &str, shape: &[usize], data: Vec<u8>, size: usize) {
        let key = self.entries.len().to_string();
        self.string(name);
        self.text.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        self.string("storage");
        self.text.extend(format!("ctorch\n{storage}\n").as_bytes());
        self.string(&key);
        self.string("cpu");
        self.number(data.len() / size);
        self.text.extend(b"tQ");
        self.number(0);
        self.counts(shape);
        let mut strides = vec![1; shape.len()];
        (1..shape.len()).rev().for_each(|axis| strides[axis - 1] = strides[axis] * shape[axis]);
        self.counts(&strides);
        self.text.extend(b"\x89ccollections\nOrderedDict\n)RtR");
        self.entries.push((format!("archive/data/{key}"), data));
    }

    fn finish(mut self) -> Vec<u8> {
        self.text.extend(b"u.");
        self.entries.push(("archive/data.pkl".to_owned(), self.text));
        archive(self.entries, false)
    }
}

pub fn torch(tensors: &BTreeMap<String, Tensor>, tokens: &[i64]) -> Vec<u8> {
    let mut pickle = Pickle::new();
    if !tokens.is_empty() {
        let ids = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        pickle.tensor("input_ids", "LongStorage", &[1, tokens.len()], ids, 8);
    }
    for (name, tensor) in tensors {
        pickle.tensor(name, "FloatStorage", &tensor.shape, bytes_of(&tensor.values), 4);
    }
    pickle.finish()
}

pub fn torch_integers(name: &str, values: &[i64]) -> Vec<u8> {
    let mut pickle = Pickle::new();
    let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    pickle.tensor(name, "LongStorage", &[values.len()], data, 8);
    pickle.finish()
}
