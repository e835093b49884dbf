//! The GGUF reader on right files, on every kind of wrong file, and on files that were tampered with.

use std::path::Path;

use parity::gguf::{Array, DType, Gguf, Value, decode, parse};
use proptest::prelude::*;

use crate::support::gguf_writer::GgufWriter;

/// One value of every type, arrays of every type and an array of arrays.
fn every_value() -> Vec<(&'static str, Value)> {
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
fn sample() -> GgufWriter {
    let mut writer = GgufWriter::new();
    for (key, value) in every_value() {
        writer = writer.with(key, value);
    }
    let tensors: [(&str, DType, &[usize]); 4] = [
        ("matrix", DType::F16, &[3, 4]),
        ("blocks", DType::Q8_0, &[2, 64]),
        ("vector", DType::F32, &[5]),
        ("scalar", DType::F32, &[]),
    ];
    tensors.into_iter().fold(writer, |writer, (name, dtype, shape)| with_tensor(writer, name, dtype, shape))
}

/// With one more tensor, whose bytes count up from 0.
fn with_tensor(mut writer: GgufWriter, name: &str, dtype: DType, shape: &[usize]) -> GgufWriter {
    let len = shape.iter().product::<usize>() / dtype.block_len() * dtype.block_bytes();
    writer.tensors.push((name.to_owned(), dtype, shape.to_vec(), (0..len).map(|i| i as u8).collect()));
    writer
}

fn error(writer: &GgufWriter) -> String {
    error_of(&writer.bytes())
}

fn error_of(bytes: &[u8]) -> String {
    parse("model.gguf", bytes).expect_err("the file is wrong").to_string()
}

/// The sample with the first occurrence of `old` after `anchor` replaced by `new`.
fn patched(bytes: &[u8], anchor: &[u8], skip: usize, new: &[u8]) -> Vec<u8> {
    let at = bytes.windows(anchor.len()).position(|w| w == anchor).expect("the anchor is there");
    let at = at + anchor.len() + skip;
    let mut bytes = bytes.to_vec();
    bytes[at..at + new.len()].copy_from_slice(new);
    bytes
}

#[test]
fn everything_that_is_written_is_read() {
    for version in [2, 3] {
        let writer = GgufWriter { version, ..sample() };
        let parsed = parse("model.gguf", &writer.bytes()).unwrap();
        assert_eq!(parsed.version, version);
        let values: Vec<(&str, Value)> =
            parsed.metadata.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
        assert_eq!(values, every_value());
        let bytes = writer.bytes();
        for (info, (name, dtype, shape, data)) in parsed.tensors.iter().zip(&writer.tensors) {
            assert_eq!((&info.name, info.dtype, &info.shape), (name, *dtype, shape));
            assert_eq!(&bytes[info.offset..info.offset + info.byte_len], data);
            assert_eq!(info.offset % 32, 0);
        }
        assert_eq!(parsed.tensors[0].rows(), 3);
        assert_eq!(parsed.tensors[0].cols(), 4);
        assert_eq!(parsed.tensors[3].elements(), 1);
    }
}

#[test]
fn the_alignment_of_the_file_is_used() {
    let writer = sample().with("general.alignment", Value::U32(128));
    let parsed = parse("model.gguf", &writer.bytes()).unwrap();
    assert!(parsed.tensors.iter().all(|tensor| tensor.offset % 128 == 0));
    let wrong = |value| error(&GgufWriter::new().with("general.alignment", value));
    for value in [Value::U32(0), Value::U32(24), Value::String("32".into()), Value::I32(-32)] {
        assert!(wrong(value).contains("unusable `general.alignment`"));
    }
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let bytes = sample().bytes();
    for len in 0..bytes.len() {
        let text = error_of(&bytes[..len]);
        assert!(text.starts_with("model.gguf: "), "{len}: {text}");
        if len >= 8 {
            assert!(text.contains("hint:") && text.contains("found:"), "{len}: {text}");
        }
    }
}

#[test]
fn a_cut_or_empty_file_is_an_error_on_disk_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = sample().bytes();
    for len in [0, 1, 23, 24, 100, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..len]).unwrap();
        let text = Gguf::open(&path).unwrap_err().to_string();
        assert!(text.contains("model.gguf: "), "{text}");
    }
    let of_folder = Gguf::open(folder.path()).unwrap_err().to_string();
    assert!(of_folder.contains("regular file"), "{of_folder}");
    let absent = Gguf::open(&folder.path().join("absent.gguf")).unwrap_err().to_string();
    assert!(absent.contains("absent.gguf") && absent.contains("No such file"), "{absent}");
}

#[test]
fn other_formats_are_named() {
    assert!(error_of(b"PK\x03\x04 a zip file").contains("is not a GGUF file"));
    let big = [b"GGUF".as_slice(), &3u32.to_be_bytes(), &[0; 16]].concat();
    let text = error_of(&big);
    assert!(
        text.contains("big-endian") && text.contains("version 3") && text.contains("gguf-convert-endian")
    );
    for version in [0, 1, 4, 0xffff] {
        assert!(error(&GgufWriter { version, ..sample() }).contains("version that parity does not read"));
    }
}

#[test]
fn announced_counts_are_held_against_the_file() {
    let bytes = sample().bytes();
    for (at, things) in [(8, "tensors"), (16, "metadata entries")] {
        for count in [1000, u64::from(u32::MAX), u64::MAX / 24, u64::MAX] {
            let mut bytes = bytes.clone();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            let text = error_of(&bytes);
            assert!(text.contains(&format!("announces more {things}")), "{text}");
        }
    }
    // An array's length stands behind its key, its type (4 bytes) and its element type (4 bytes).
    for key in ["f64s", "strings", "nested", "bools"] {
        for count in [1u64 << 20, u64::MAX / 8, u64::MAX] {
            let text = error_of(&patched(&bytes, key.as_bytes(), 8, &count.to_le_bytes()));
            assert!(text.contains("announces more elements") && text.contains(key), "{text}");
        }
    }
    let text = error_of(&patched(&bytes, b"string", 4, &u64::MAX.to_le_bytes()));
    assert!(text.contains("announces more bytes of text") && text.contains("`string`"), "{text}");
}

#[test]
fn bad_values_are_named() {
    let bytes = sample().bytes();
    let text = error_of(&patched(&bytes, b"\x04\0\0\0\0\0\0\0bool", 4, &[2]));
    assert!(text.contains("bool that is neither 0 nor 1 in metadata `bool`"), "{text}");
    let text = error_of(&patched(&bytes, b"string", 12, &[0xff]));
    assert!(text.contains("not UTF-8") && text.contains("`string`"), "{text}");
    let text = error_of(&patched(&bytes, b"f64s", 0, &13u32.to_le_bytes()));
    assert!(text.contains("unknown value type"), "{text}");
    let twice = sample().with("u8", Value::U8(1));
    assert!(error(&twice).contains("metadata key `u8` twice"));
}

#[test]
fn nesting_ends() {
    let nest = |levels| {
        let array = (0..levels).fold(Array::U8(vec![1]), |inner, _| Array::Array(vec![inner]));
        GgufWriter::new().with("deep", Value::Array(array))
    };
    assert!(parse("model.gguf", &nest(7).bytes()).is_ok());
    assert!(error(&nest(8)).contains("nests arrays too deeply in metadata `deep`"));
    // Much nesting must not end the stack: bytes by hand, as building and dropping such a value would.
    let header = GgufWriter::new().with("deep", Value::Array(Array::Array(vec![]))).bytes();
    let level = [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes()].concat();
    let text = error_of(&[&header[..header.len() - level.len()], &level.repeat(50_000)].concat());
    assert!(text.contains("nests arrays too deeply"), "{text}");
}

#[test]
fn bad_tensors_are_named() {
    let bytes = sample().bytes();
    // Behind a tensor's name: axes (4 bytes), 8 bytes an axis, type (4), offset (8).
    let text = error_of(&patched(&bytes, b"matrix", 0, &5u32.to_le_bytes()));
    assert!(text.contains("`matrix` has too many axes"), "{text}");
    for number in [4u32, 31, 99, u32::MAX] {
        let text = error_of(&patched(&bytes, b"matrix", 4 + 16, &number.to_le_bytes()));
        assert!(text.contains("`matrix` has a type that parity does not know"), "{text}");
        assert!(text.contains(&number.to_string()));
    }
    let text = error_of(&patched(&bytes, b"blocks", 4, &33u64.to_le_bytes()));
    assert!(text.contains("`blocks` has rows that are no whole number of Q8_0 blocks"), "{text}");
    for axis in [1u64 << 62, 1 << 60, !31u64] {
        let text = error_of(&patched(&bytes, b"matrix", 4, &axis.to_le_bytes()));
        assert!(text.contains("larger than memory can address"), "{text}");
    }
    let text = error_of(&patched(&bytes, b"matrix", 4, &(1u64 << 40).to_le_bytes()));
    assert!(text.contains("ends before the data of tensor `matrix`"), "{text}");
    let text = error_of(&patched(&bytes, b"vector", 4 + 8 + 4, &33u64.to_le_bytes()));
    assert!(text.contains("`vector` starts at a misaligned offset"), "{text}");
    for offset in [1u64 << 40, !31u64] {
        let text = error_of(&patched(&bytes, b"vector", 4 + 8 + 4, &offset.to_le_bytes()));
        assert!(text.contains("ends before the data of tensor `vector`"), "{text}");
    }
}

fn on_disk(folder: &Path, name: &str, writer: &GgufWriter) -> std::path::PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, writer.bytes()).unwrap();
    path
}

#[test]
fn a_tensor_twice_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = on_disk(folder.path(), "m.gguf", &with_tensor(sample(), "matrix", DType::F32, &[2]));
    assert!(Gguf::open(&path).unwrap_err().to_string().contains("tensor `matrix` twice"));
}

#[test]
fn metadata_is_read_as_what_is_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&on_disk(folder.path(), "m.gguf", &sample())).unwrap();
    assert_eq!(gguf.u32("u8").unwrap(), Some(200));
    assert_eq!(gguf.i32("i8").unwrap(), Some(-100));
    assert_eq!(gguf.u64("u64").unwrap(), Some(u64::MAX));
    assert_eq!(gguf.f32("f32").unwrap(), Some(1.5e-6));
    assert_eq!(gguf.bool("bool").unwrap(), Some(true));
    assert_eq!(gguf.str("string").unwrap(), Some("ünïcode"));
    assert_eq!(gguf.strings("strings").unwrap().unwrap(), ["x", "yz"]);
    assert_eq!(gguf.f32s("f64s").unwrap().unwrap(), [0.25]);
    assert_eq!(gguf.i32s("u8s").unwrap().unwrap(), [1, 2, 3]);
    assert_eq!(gguf.u32s("u32s").unwrap().unwrap(), [5, 6]);
    assert_eq!(gguf.u32("absent").unwrap(), None);
    let absent = gguf.require_u32("absent").unwrap_err().to_string();
    assert!(
        absent.contains("m.gguf: lacks metadata `absent`") && absent.contains("parity inspect"),
        "{absent}"
    );
    for (key, found) in
        [("u64", "uint64 18446744073709551615"), ("i8", "int8 -100"), ("string", "string \"ünïcode\"")]
    {
        let text = gguf.u32(key).unwrap_err().to_string();
        assert!(text.contains("an integer that fits u32") && text.contains(found), "{text}");
    }
    assert!(gguf.u32s("i32s").unwrap_err().to_string().contains("2 x int32 [-5, 6]"));
}

#[test]
fn tensors_are_held_against_a_shape() {
    let folder = tempfile::tempdir().unwrap();
    let writer = with_tensor(sample(), "grid", DType::IQ2_XXS, &[256]);
    let gguf = Gguf::open(&on_disk(folder.path(), "m.gguf", &writer)).unwrap();
    let matrix = gguf.require_tensor("matrix", &[3, 4]).unwrap();
    let mut row = [0f32; 4];
    matrix.decode_rows(1..2, &mut row);
    assert_eq!(row, matrix.decode::<f32>()[4..8]);
    let text = gguf.require_tensor("matrix", &[4, 3]).unwrap_err().to_string();
    assert!(text.contains("[4, 3]") && text.contains("[3, 4]"), "{text}");
    let text = gguf.require_tensor("grid", &[256]).unwrap_err().to_string();
    assert!(text.contains("cannot decode") && text.contains("IQ2_XXS"), "{text}");
    let text = gguf.require_tensor("none", &[1]).unwrap_err().to_string();
    assert!(text.contains("lacks tensor `none`"), "{text}");
    assert!(gguf.optional_tensor("none", &[1]).unwrap().is_none());
}

/// A part of a split model with one tensor.
fn shard(number: u16, count: u16) -> GgufWriter {
    let writer = GgufWriter::new()
        .with("split.no", Value::U16(number))
        .with("split.count", Value::U16(count))
        .with("split.tensors.count", Value::I32(i32::from(count)));
    with_tensor(writer, &format!("tensor.{number}"), DType::F32, &[usize::from(number) + 1])
}

#[test]
fn a_split_model_is_one_model() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..3)
        .map(|n| on_disk(folder.path(), &format!("m-{:05}-of-00003.gguf", n + 1), &shard(n, 3)))
        .collect();
    for path in &paths {
        let gguf = Gguf::open(path).unwrap();
        assert_eq!(gguf.tensors().map(|t| t.elements()).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(gguf.tensor("tensor.2").unwrap().bytes, (0..12).collect::<Vec<u8>>());
    }
    let open = || Gguf::open(&paths[0]).unwrap_err().to_string();
    std::fs::write(&paths[2], shard(1, 3).bytes()).unwrap();
    assert!(open().contains("not the file of the split model that its name says"));
    std::fs::write(&paths[2], GgufWriter { tensors: vec![], ..shard(2, 3) }.bytes()).unwrap();
    assert!(open().contains("another number of tensors"));
    std::fs::remove_file(&paths[2]).unwrap();
    assert!(open().contains("m-00003-of-00003.gguf"));
    let renamed = on_disk(folder.path(), "other.gguf", &shard(0, 3));
    assert!(Gguf::open(&renamed).unwrap_err().to_string().contains("-00001-of-00003.gguf"));
}

/// Reads whatever is readable; every panic fails the test.
fn read_all(bytes: &[u8]) {
    let Ok(parsed) = parse("model.gguf", bytes) else { return };
    for info in &parsed.tensors {
        let data = &bytes[info.offset..info.offset + info.byte_len];
        assert_eq!(info.rows() * info.cols(), info.elements());
        if info.dtype.is_decodable() {
            decode(info.dtype, data, &mut vec![0f32; info.elements()]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_tampered_file_is_read_or_refused(
        bytes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        words in prop::collection::vec(
            (any::<prop::sample::Index>(), prop::sample::select(vec![0, 1, 31, 255, 1 << 31, u64::MAX / 8, 1 << 63, u64::MAX])),
            0..3,
        ),
        len in any::<prop::sample::Index>(),
        cut in prop::bool::weighted(0.2),
    ) {
        let mut file = sample().bytes();
        for (at, byte) in bytes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        for (at, word) in words {
            let at = at.index(file.len() - 8);
            file[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        if cut {
            file.truncate(len.index(file.len()));
        }
        read_all(&file);
    }

    #[test]
    fn random_bytes_behind_a_header_are_read_or_refused(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        read_all(&[b"GGUF\x03\0\0\0".as_slice(), &tail].concat());
    }
}
