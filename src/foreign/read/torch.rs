//! torch's files (`torch.save`, the zip form): a pickle of what there is, and the elements beside it. The pickle is read
//! as data, never executed.

use std::path::Path;

use parity_dump::Element;

use super::archive::Archive;
use super::pickle::{Pickle, Ref, VALUES_MAX, Value};
use crate::error::{Error, Result};
use crate::foreign::array::{Array, Type};

/// Bytes of a pickle: some hundred for each tensor.
const PICKLE_BYTES_MAX: usize = 256 << 20;

/// Dictionaries and lists within one another.
const DEPTH_MAX: usize = 32;

/// Letters of a name, keys of all dictionaries around it together.
const NAME_MAX: usize = 1 << 10;

/// Tensors of a file.
const TENSORS_MAX: usize = 1 << 20;

/// Every tensor of a file: by its keys and indices with dots between them, by `alone` where the file is one tensor.
///
/// # Errors
/// What is no such file, a tensor that lies outside of its data.
pub fn read(path: &Path, alone: &str) -> Result<Vec<Array>> {
    let mut archive = Archive::open(path)?;
    let wrong = |what: String| {
        Error::file(path, "is no file of torch's tensors")
            .expected("what torch.save writes of a tensor, or of a dictionary or list of tensors")
            .found(what)
            .hint("python -c 'import torch; torch.save({k: v for k, v in torch.load(\"in.pt\").items()}, \"out.pt\")'")
    };
    let data = archive.names.iter().find(|name| name.ends_with("/data.pkl")).cloned();
    let data = data.ok_or_else(|| wrong("an archive without data.pkl".to_owned()))?;
    let folder = data.trim_end_matches("data.pkl").to_owned();
    let (bytes, range) = archive.entry(&data).map_err(|e| Error::file(path, e))?;
    if range.len() > PICKLE_BYTES_MAX {
        return Err(wrong(format!("a pickle of {} bytes", range.len())));
    }
    let pickle = Pickle::parse(&bytes.as_slice()[range]).map_err(wrong)?;
    let mut found = Vec::new();
    let mut todo = vec![(pickle.root, String::new(), 0usize)];
    let mut looked_at = 0usize;
    while let Some((at, name, depth)) = todo.pop() {
        looked_at += 1;
        if looked_at > VALUES_MAX || found.len() > TENSORS_MAX {
            return Err(wrong(format!("more than {VALUES_MAX} values or {TENSORS_MAX} tensors")));
        }
        let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
        match pickle.get(at) {
            _ if name.len() > NAME_MAX => return Err(wrong(format!("a name of {} letters", name.len()))),
            _ if depth > DEPTH_MAX => return Err(wrong("a nest without an end".to_owned())),
            Value::Dict(entries) => {
                for (key, value) in entries.iter().rev() {
                    let key = pickle
                        .text(*key)
                        .map(str::to_owned)
                        .or_else(|| pickle.count(*key).map(|n| n.to_string()));
                    key.into_iter().for_each(|key| todo.push((*value, below(&key), depth + 1)));
                }
            }
            Value::List(members) => {
                let members = members.iter().enumerate().rev();
                members.for_each(|(i, member)| todo.push((*member, below(&i.to_string()), depth + 1)));
            }
            Value::Call(function, arguments) => {
                if let Some(inner) = wrapped(&pickle, *function, *arguments) {
                    todo.push((inner, name, depth + 1));
                } else if let Some(tensor) = tensor(&pickle, *function, *arguments) {
                    let name = if name.is_empty() { alone.to_owned() } else { name };
                    let entry = format!("{folder}data/{}", tensor.key);
                    let (bytes, range) = archive.entry(&entry).map_err(|e| Error::file(path, e))?;
                    let offset = tensor
                        .offset
                        .checked_mul(tensor.dtype.size())
                        .and_then(|o| o.checked_add(range.start));
                    let offset = offset.ok_or_else(|| wrong(format!("{name} at {}", tensor.offset)))?;
                    let array =
                        Array::new(&name, tensor.dtype, tensor.shape, Some(tensor.strides), offset, bytes);
                    found.push(array.map_err(|e| Error::file(path, e))?);
                }
            }
            _ => {}
        }
    }
    match found.is_empty() {
        true => Err(wrong("no tensor of plain numbers".to_owned())),
        false => Ok(found),
    }
}

/// A tensor as a pickle describes it; offset and strides in elements.
struct Tensor {
    dtype: Type,
    key: String,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

/// What a call wraps that changes nothing: a parameter, a tensor of a subclass.
fn wrapped(pickle: &Pickle, function: Ref, arguments: Ref) -> Option<Ref> {
    let Value::Global(name) = pickle.get(function) else { return None };
    let Value::List(arguments) = pickle.get(arguments) else { return None };
    match name.as_str() {
        "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state" => {
            arguments.first().copied()
        }
        _ => None,
    }
}

/// `torch._utils._rebuild_tensor_v2(storage, offset, shape, strides, …)`.
fn tensor(pickle: &Pickle, function: Ref, arguments: Ref) -> Option<Tensor> {
    let name = match pickle.get(function) {
        Value::Global(name) => name.as_str(),
        _ => return None,
    };
    let Value::List(arguments) = pickle.get(arguments) else { return None };
    if name == "torch._tensor._rebuild_from_type_v2" {
        // (function, type, its arguments, state)
        return tensor(pickle, *arguments.first()?, *arguments.get(2)?);
    }
    if !matches!(name, "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor") {
        return None;
    }
    let counts =
        |at: &Ref| pickle.list(*at)?.iter().map(|at| pickle.count(*at)).collect::<Option<Vec<usize>>>();
    let Value::Outside(storage) = pickle.get(*arguments.first()?) else { return None };
    // ("storage", type of the storage, its key, device, count)
    let storage = pickle.list(*storage)?;
    let Value::Global(kind) = pickle.get(*storage.get(1)?) else { return None };
    let dtype = dtype(kind)?;
    let key = pickle.text(*storage.get(2)?)?.to_owned();
    let offset = pickle.count(*arguments.get(1)?)?;
    let (shape, strides) = (counts(arguments.get(2)?)?, counts(arguments.get(3)?)?);
    Some(Tensor { dtype, key, offset, shape, strides })
}

fn dtype(storage: &str) -> Option<Type> {
    Some(match storage.strip_prefix("torch.")? {
        "FloatStorage" => Type::Float(Element::F32),
        "HalfStorage" => Type::Float(Element::F16),
        "BFloat16Storage" => Type::Float(Element::Bf16),
        "DoubleStorage" => Type::F64,
        "LongStorage" => Type::Int(8),
        "IntStorage" => Type::Int(4),
        "ShortStorage" => Type::Int(2),
        "CharStorage" => Type::Int(1),
        "ByteStorage" | "BoolStorage" => Type::Uint(1),
        _ => return None,
    })
}
