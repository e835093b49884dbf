//! numpy's array files: a magic number, a version, a header that is a Python dictionary, and the elements.

use parity_dump::Element;

use crate::error::{Error, Result};
use crate::foreign::array::{Array, Bytes, Type};

/// How every `.npy` file begins.
pub const MAGIC: &[u8] = b"\x93NUMPY";

/// Bytes of a header: numpy itself reads none that is longer without being told to.
const HEADER_BYTES_MAX: usize = 1 << 16;

/// Axes of an array: numpy has no more.
const AXES_MAX: usize = 64;

/// The array that begins at byte `start` of `bytes` and is called `name`.
///
/// # Errors
/// No header of an array, an element type that is no plain number.
pub fn array(name: &str, bytes: &Bytes, start: usize) -> Result<Array> {
    let data = bytes.as_slice().get(start..).unwrap_or_default();
    let wrong = |what: String| {
        Error::new(name, "is no numpy array of plain numbers")
            .expected("a .npy header: '<f4', '<f2', '<f8' or whole numbers, with a shape")
            .found(what)
            .hint("numpy.save(\"x.npy\", numpy.asarray(x, numpy.float32)) writes one")
    };
    let header = header(data).ok_or_else(|| wrong("another beginning".to_owned()))?;
    let text = std::str::from_utf8(&data[header.clone()]).map_err(|e| wrong(e.to_string()))?;
    let descr = value(text, "descr").ok_or_else(|| wrong(text.trim().to_owned()))?;
    let descr = descr.trim_matches(['\'', '"']);
    let dtype = dtype(descr).ok_or_else(|| wrong(format!("elements of type {descr}")))?;
    let is_fortran = value(text, "fortran_order").is_some_and(|value| value.starts_with("True"));
    let shape = value(text, "shape").and_then(shape).ok_or_else(|| wrong(text.trim().to_owned()))?;
    let offset = start + header.end;
    if !is_fortran {
        return Array::new(name, dtype, shape, None, offset, bytes.clone());
    }
    let reversed: Vec<usize> = shape.iter().rev().copied().collect();
    let order: Vec<usize> = (0..shape.len()).rev().collect();
    Array::new(name, dtype, reversed, None, offset, bytes.clone())?.permuted(&order)
}

/// Where the header's text lies.
fn header(data: &[u8]) -> Option<std::ops::Range<usize>> {
    let rest = data.strip_prefix(MAGIC)?;
    let major = *rest.first()?;
    let (length, start) = match major {
        1 => (usize::from(u16::from_le_bytes(rest.get(2..4)?.try_into().ok()?)), MAGIC.len() + 4),
        2 | 3 => (u32::from_le_bytes(rest.get(2..6)?.try_into().ok()?) as usize, MAGIC.len() + 6),
        _ => return None,
    };
    let end = start + length;
    (length <= HEADER_BYTES_MAX && end <= data.len()).then_some(start..end)
}

/// The text behind a key, up to the end of the header.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let quoted = [format!("'{key}'"), format!("\"{key}\"")];
    let at = quoted.iter().find_map(|quoted| text.find(quoted).map(|at| at + quoted.len()))?;
    let rest = text[at..].trim_start().strip_prefix(':')?.trim_start();
    let end = match rest.starts_with('(') {
        true => rest.find(')')? + 1,
        false => rest.find([',', '}']).unwrap_or(rest.len()),
    };
    Some(rest[..end].trim())
}

fn shape(text: &str) -> Option<Vec<usize>> {
    let inner = text.strip_prefix('(')?.strip_suffix(')')?;
    let extents = inner.split(',').map(str::trim).filter(|extent| !extent.is_empty());
    let shape: Option<Vec<usize>> = extents.map(|extent| extent.parse().ok()).collect();
    shape.filter(|shape| shape.len() <= AXES_MAX)
}

fn dtype(descr: &str) -> Option<Type> {
    Some(match descr {
        "<f4" => Type::Float(Element::F32),
        "<f2" => Type::Float(Element::F16),
        "<f8" => Type::F64,
        // What numpy writes of bfloat16 of the package ml_dtypes.
        "<V2" | "|V2" | "bfloat16" => Type::Float(Element::Bf16),
        "|b1" | "|u1" => Type::Uint(1),
        "|i1" => Type::Int(1),
        "<u2" => Type::Uint(2),
        "<i2" => Type::Int(2),
        "<u4" => Type::Uint(4),
        "<i4" => Type::Int(4),
        "<u8" => Type::Uint(8),
        "<i8" => Type::Int(8),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn file(header: &str, data: &[u8]) -> Bytes {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0]);
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        Bytes::Owned(Arc::new(bytes))
    }

    #[test]
    fn both_orders_and_all_types_are_read() {
        let values: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let c = file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", &values);
        assert_eq!(array("x", &c, 0).unwrap().values(), [0., 1., 2., 3., 4., 5.]);
        let f = file("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n", &values);
        let f = array("x", &f, 0).unwrap();
        assert_eq!((f.shape.clone(), f.values()), (vec![2, 3], vec![0., 2., 4., 1., 3., 5.]));
        let one = file("{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }", &7i64.to_le_bytes());
        assert_eq!(array("x", &one, 0).unwrap().integers(), Some(vec![7]));
    }

    #[test]
    fn what_is_no_array_of_numbers_is_refused() {
        for (header, size) in [
            ("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", 64),
            ("{'descr': '>f4', 'fortran_order': False, 'shape': (2,), }", 64),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999,), }", 64),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (18446744073709551615, 3), }", 64),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", 64),
            ("{'descr': '<f4'}", 64),
            ("", 0),
        ] {
            assert!(array("x", &file(header, &vec![0; size]), 0).is_err(), "{header}");
        }
        assert!(array("x", &Bytes::Owned(Arc::new(b"\x93NUMPY\x01\0\xff\xff".to_vec())), 0).is_err());
    }
}
