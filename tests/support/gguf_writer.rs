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
