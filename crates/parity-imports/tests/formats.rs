//! Libraries of every format and processor (scripts/make-import-fixtures.sh), and what is done to them.

use std::fs;
use std::path::Path;

use parity_imports::Machine::{Aarch64, X86_64};
use parity_imports::{Format, Machine, imports};

/// A file, its processor, its format, and where its slots are.
type File = (&'static str, Machine, Format, [(&'static str, u64); 3]);

/// All of them, with what readelf, llvm-objdump and llvm-readobj say of the same files.
const FILES: [File; 8] = [
    ("elf-x86_64.so", X86_64, Format::Elf, [(CALL, 0x34d0), (ADDRESS, 0x24a0), (WORD, 0x34a8)]),
    ("elf-aarch64.so", Aarch64, Format::Elf, [(CALL, 0x34e0), (ADDRESS, 0x24b0), (WORD, 0x34b8)]),
    (
        "macho-x86_64-opcodes.dylib",
        X86_64,
        Format::MachO,
        [(ADDRESS, 0x1000), (WORD, 0x2008), (CALL, 0x2000)],
    ),
    (
        "macho-x86_64-chained.dylib",
        X86_64,
        Format::MachO,
        [(ADDRESS, 0x1000), (CALL, 0x1008), (WORD, 0x2000)],
    ),
    (
        "macho-aarch64-opcodes.dylib",
        Aarch64,
        Format::MachO,
        [(ADDRESS, 0x4000), (WORD, 0x8008), (CALL, 0x8000)],
    ),
    (
        "macho-aarch64-chained.dylib",
        Aarch64,
        Format::MachO,
        [(ADDRESS, 0x4000), (CALL, 0x4008), (WORD, 0x8000)],
    ),
    ("pe-x86_64.dll", X86_64, Format::Pe, [(ADDRESS, 0x20b8), (CALL, 0x20c0), (WORD, 0x3008)]),
    ("pe-aarch64.dll", Aarch64, Format::Pe, [(ADDRESS, 0x20b0), (CALL, 0x20b8), (WORD, 0x3008)]),
];

const CALL: &str = "llama_decode";
const ADDRESS: &str = "ggml_backend_tensor_set";
const WORD: &str = "llama_get_logits";

fn bytes(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap()
}

#[test]
fn slots_are_where_other_readers_find_them() {
    for (name, machine, format, expected) in FILES {
        let file = bytes(name);
        let found = imports(&file, machine).unwrap();
        let slots: Vec<(&str, u64)> = found.slots.iter().map(|slot| (slot.name, slot.offset)).collect();
        assert_eq!((found.format, &slots[..]), (format, &expected[..]), "{name}");
        let libraries = match format {
            Format::Elf => vec!["libother.so"],
            Format::MachO => vec!["@rpath/libother.dylib"],
            Format::Pe => vec!["other.dll", "later.dll"],
        };
        assert_eq!(found.libraries, libraries, "{name}");
    }
}

#[test]
fn a_file_for_another_processor_is_refused() {
    for (name, machine, ..) in FILES {
        let other = if machine == X86_64 { Aarch64 } else { X86_64 };
        let said = imports(&bytes(name), other).unwrap_err().to_string();
        assert_eq!(said, "it is for another kind of processor", "{name}");
    }
    for file in [&b""[..], b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"#!/bin/sh\n", b"\xce\xfa\xed\xfe"] {
        assert!(imports(file, X86_64).is_err());
    }
}

#[test]
fn a_universal_file_is_read_for_the_processor_that_is_asked_for() {
    let parts = [
        (0x0100_0007u32, bytes("macho-x86_64-chained.dylib")),
        (0x0100_000c, bytes("macho-aarch64-opcodes.dylib")),
    ];
    let mut file = [&0xcafe_babeu32.to_be_bytes()[..], &2u32.to_be_bytes()].concat();
    let mut at = 64u32;
    for (kind, part) in &parts {
        for word in [*kind, 0, at, part.len() as u32, 0] {
            file.extend(word.to_be_bytes());
        }
        at += part.len() as u32;
    }
    file.resize(64, 0);
    parts.iter().for_each(|(_, part)| file.extend(part));
    assert_eq!(imports(&file, X86_64), imports(&parts[0].1, X86_64));
    assert_eq!(imports(&file, Aarch64), imports(&parts[1].1, Aarch64));
}

#[test]
fn a_file_whose_addresses_are_signed_is_refused() {
    let mut file = bytes("macho-aarch64-opcodes.dylib");
    file[8] = 2;
    assert!(imports(&file, Aarch64).unwrap_err().to_string().contains("signed"));
}

/// What must hold of any bytes: they are refused, or have no more slots than words.
fn survives(file: &[u8], machine: Machine) {
    if let Ok(found) = imports(file, machine) {
        assert!(found.slots.len() <= file.len() / 8);
        assert!(found.libraries.len() <= file.len());
    }
}

#[test]
fn what_is_cut_short_or_changed_anywhere_is_refused_or_read_within_its_bounds() {
    for (name, machine, ..) in FILES {
        let file = bytes(name);
        // Pages that are zeros to their end tell nothing new.
        let told =
            |at: &usize| file[at.saturating_sub(8)..file.len().min(at + 8)].iter().any(|&byte| byte != 0);
        for at in (0..file.len()).filter(told) {
            survives(&file[..at], machine);
            let mut changed = file.clone();
            for value in [0, 1, 0x7f, 0x80, 0xff, file[at].wrapping_add(1)] {
                changed[at] = value;
                survives(&changed, machine);
            }
        }
    }
}

/// A Mach-O of one segment whose bindings are this list.
fn bound_by(list: &[u8]) -> Vec<u8> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let longs = |longs: &[u64]| longs.iter().flat_map(|long| long.to_le_bytes()).collect::<Vec<u8>>();
    let (size, start) = (152 + list.len() as u64, 152u32);
    [
        words(&[0xfeed_facf, 0x0100_0007, 3, 6, 2, 120, 0, 0]),
        words(&[0x19, 72]),
        vec![0; 16],
        longs(&[0x10_0000, 0x1000, 0, size]),
        words(&[7, 3, 0, 0]),
        words(&[0x8000_0022, 48, 0, 0, start, list.len() as u32, 0, 0, 0, 0, 0, 0]),
        list.to_vec(),
    ]
    .concat()
}

#[test]
fn instructions_bind_as_they_say() {
    // The symbol _f at 16 of segment 0, bound; then 8 bytes left out behind a word, and bound three times by 24 bytes.
    let list = b"\x11\x40_f\0\x51\x70\x10\x90\xa0\x08\xc0\x03\x10\xb2\x90\x00\x00";
    let file = bound_by(list);
    let slots: Vec<u64> = imports(&file, X86_64).unwrap().slots.iter().map(|slot| slot.offset).collect();
    assert_eq!(slots, [16, 24, 40, 64, 88, 112, 136]);
    // With an addend, or a name that C has not, a binding is none of a function.
    assert_eq!(imports(&bound_by(b"\x40_f\0\x60\x08\x70\x00\x90"), X86_64).unwrap().slots, []);
    assert_eq!(imports(&bound_by(b"\x40f\0\x70\x00\x90"), X86_64).unwrap().slots, []);
}

#[test]
fn claims_that_no_file_has_room_for_are_refused() {
    let many = b"\x40_f\0\x70\x00\xc0\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x00";
    let said = imports(&bound_by(many), X86_64).unwrap_err().to_string();
    assert_eq!(said, "it has more imports than room for them");
    for list in [&b"\x75\x00\x90"[..], b"\xd0\x00", b"\x40_f", b"\x70\xff"] {
        assert!(imports(&bound_by(list), X86_64).is_err(), "{list:x?}");
    }
    // A command without a length, and more commands than bytes.
    let mut file = bound_by(b"");
    file[36] = 0;
    assert!(imports(&file, X86_64).is_err());
    file[36] = 72;
    file[16] = 0xff;
    assert!(imports(&file, X86_64).is_err());
}
