//! Writes small GGUF files, right and wrong ones.

use parity::gguf::{Array, DType, Value};

/// A file to be written.
#[derive(Clone, Default)]
pub struct GgufWriter {
    pub version: u32,
    pub metadata: Vec<(String, Value)>,
    /// Name, type, shape (slowest axis first), stored bytes.
    pub tensors: Vec<(String, DType, Vec<usize>, Vec<u8>)>,
}

impl GgufWriter {
    pub fn new() -> Self {
        GgufWriter { version: 3, ..Self::default() }
    }

    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    /// A tensor of `dtype` whose bytes count up from 0.
    #[must_use]
    pub fn with_tensor(mut self, name: &str, dtype: DType, shape: &[usize]) -> Self {
        let len = shape.iter().product::<usize>() / dtype.block_len() * dtype.block_bytes();
        self.tensors.push((name.to_owned(), dtype, shape.to_vec(), (0..len).map(|i| i as u8).collect()));
        self
    }

    fn alignment(&self) -> usize {
        let stated = self.metadata.iter().find(|(key, _)| key == "general.alignment");
        stated.and_then(|(_, value)| value.as_integer()).map_or(32, |v| v as usize)
    }

    /// The file. It ends with the last byte of the last tensor.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            out.extend((value.value_type() as u32).to_le_bytes());
            write_value(&mut out, value);
        }
        let mut offset = 0usize;
        for (name, dtype, shape, bytes) in &self.tensors {
            string(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            for axis in shape.iter().rev() {
                out.extend((*axis as u64).to_le_bytes());
            }
            out.extend(dtype.number().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + bytes.len()).next_multiple_of(self.alignment());
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment()), 0);
            out.extend(bytes);
        }
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(text) => string(out, text),
        Value::Array(array) => write_array(out, array),
    }
}

fn write_array(out: &mut Vec<u8>, array: &Array) {
    out.extend((array.element_type() as u32).to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    for value in array.values() {
        write_value(out, &value);
    }
}

/// One value of every type, arrays of every type and an array of arrays.
pub fn every_value() -> Vec<(&'static str, Value)> {
    let nested = Array::Array(vec![Array::I32(vec![-1, 2]), Array::String(vec!["a".into(), "".into()])]);
    vec![
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-100)),
        ("u16", Value::U16(60_000)),
        ("i16", Value::I16(-30_000)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-2_000_000_000)),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f32", Value::F32(1.5e-6)),
        ("f64", Value::F64(-1e300)),
        ("bool", Value::Bool(true)),
        ("string", Value::String("ünïcode".into())),
        ("u8s", Value::Array(Array::U8(vec![1, 2, 3]))),
        ("i8s", Value::Array(Array::I8(vec![-1]))),
        ("u16s", Value::Array(Array::U16(vec![7]))),
        ("i16s", Value::Array(Array::I16(vec![-7]))),
        ("u32s", Value::Array(Array::U32(vec![5, 6]))),
        ("i32s", Value::Array(Array::I32(vec![-5, 6]))),
        ("u64s", Value::Array(Array::U64(vec![1 << 40]))),
        ("i64s", Value::Array(Array::I64(vec![-1]))),
        ("f32s", Value::Array(Array::F32(vec![0.5, -0.5]))),
        ("f64s", Value::Array(Array::F64(vec![0.25]))),
        ("bools", Value::Array(Array::Bool(vec![true, false]))),
        ("strings", Value::Array(Array::String(vec!["x".into(), "yz".into()]))),
        ("nested", Value::Array(nested)),
        ("empty", Value::Array(Array::Bool(vec![]))),
    ]
}

/// A small file with everything in it.
pub fn sample() -> GgufWriter {
    let mut writer = GgufWriter::new();
    for (key, value) in every_value() {
        writer = writer.with(key, value);
    }
    writer
        .with_tensor("matrix", DType::F16, &[3, 4])
        .with_tensor("blocks", DType::Q8_0, &[2, 64])
        .with_tensor("vector", DType::F32, &[5])
        .with_tensor("scalar", DType::F32, &[])
}
