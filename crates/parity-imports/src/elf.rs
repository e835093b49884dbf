//! ELF, of Linux and Android: slots are words that a relocation fills with the address of a symbol.

use crate::bytes::Bytes;
use crate::{Format, Found, Imports, Machine, Result, Unreadable};

const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const SEGMENT_BYTES: u64 = 56;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const ENTRY_BYTES: u64 = 16;
const SYMBOL_BYTES: u64 = 24;
const RELOCATION_BYTES: u64 = 24;

/// Entries of the dynamic section.
mod tag {
    pub const NULL: u64 = 0;
    pub const NEEDED: u64 = 1;
    pub const PLTRELSZ: u64 = 2;
    pub const STRTAB: u64 = 5;
    pub const SYMTAB: u64 = 6;
    pub const RELA: u64 = 7;
    pub const RELASZ: u64 = 8;
    pub const RPATH: u64 = 15;
    pub const JMPREL: u64 = 23;
    pub const RUNPATH: u64 = 29;
}

/// Relocations that put the address of a symbol into a word: of a call's slot, of a slot for the address, of a word of data.
fn fills(machine: Machine) -> [u64; 3] {
    match machine {
        Machine::X86_64 => [7, 6, 1],
        Machine::Aarch64 => [1026, 1025, 257],
    }
}

/// A part of the file and where it lies when it is loaded.
struct Segment {
    address: u64,
    offset: u64,
    length: u64,
}

/// The dynamic section.
struct Dynamic<'a> {
    file: Bytes<'a>,
    segments: Vec<Segment>,
    entries: Vec<(u64, u64)>,
}

impl<'a> Dynamic<'a> {
    /// The file from an address on.
    fn at(&self, address: u64) -> Result<Bytes<'a>> {
        let holds =
            |segment: &&Segment| address.checked_sub(segment.address).is_some_and(|at| at < segment.length);
        let segment = self
            .segments
            .iter()
            .find(holds)
            .ok_or(Unreadable("it names an address that it does not have"))?;
        let at = address - segment.address;
        self.file.part(segment.offset, segment.length)?.from(at)
    }

    fn value(&self, tag: u64) -> Option<u64> {
        self.entries.iter().find(|entry| entry.0 == tag).map(|entry| entry.1)
    }

    /// A table that one entry names the address of, and another the length.
    fn table(&self, address: u64, length: u64) -> Result<Bytes<'a>> {
        match self.value(address).zip(self.value(length)) {
            Some((address, length)) if length > 0 => self.at(address)?.part(0, length),
            _ => Ok(Bytes(&[])),
        }
    }
}

/// The imports of a file.
pub fn imports(file: Bytes<'_>, machine: Machine) -> Result<Imports<'_>> {
    let number = match machine {
        Machine::X86_64 => 62,
        Machine::Aarch64 => 183,
    };
    if file.u8(4)? != CLASS_64 || file.u8(5)? != LITTLE_ENDIAN || file.u16(18)? != number {
        return Err(Unreadable("it is for another kind of processor"));
    }
    let Some(dynamic) = dynamic(file)? else {
        return Ok(Imports {
            format: Format::Elf,
            libraries: Vec::new(),
            folders: Vec::new(),
            slots: Vec::new(),
        });
    };
    let names = dynamic.value(tag::STRTAB).map_or(Ok(Bytes(&[])), |address| dynamic.at(address))?;
    let symbols = dynamic.value(tag::SYMTAB).map_or(Ok(Bytes(&[])), |address| dynamic.at(address))?;
    let mut found = Found::new(file);
    for table in [dynamic.table(tag::JMPREL, tag::PLTRELSZ)?, dynamic.table(tag::RELA, tag::RELASZ)?] {
        for at in 0..table.len() / RELOCATION_BYTES {
            let relocation = table.part(at * RELOCATION_BYTES, RELOCATION_BYTES)?;
            let (info, addend) = (relocation.u64(8)?, relocation.u64(16)?);
            let (symbol, kind) = (info >> 32, info & 0xffff_ffff);
            if !fills(machine).contains(&kind) || symbol == 0 || addend != 0 {
                continue;
            }
            let name = symbols.u32(symbol * SYMBOL_BYTES)?;
            found.push(names.name(u64::from(name)), relocation.u64(0)?)?;
        }
    }
    let texts = |tags: &[u64]| {
        let entries = dynamic.entries.iter().filter(|entry| tags.contains(&entry.0));
        entries.filter_map(|entry| names.name(entry.1)).collect()
    };
    let (libraries, folders) = (texts(&[tag::NEEDED]), texts(&[tag::RPATH, tag::RUNPATH]));
    Ok(Imports { format: Format::Elf, libraries, folders, slots: found.slots })
}

/// The dynamic section; `None` of a program that is linked statically.
fn dynamic(file: Bytes<'_>) -> Result<Option<Dynamic<'_>>> {
    let (headers, count) = (file.from(file.u64(32)?)?, u64::from(file.u16(56)?));
    let mut dynamic = Dynamic { file, segments: Vec::new(), entries: Vec::new() };
    let mut section = None;
    for index in 0..count {
        let header = headers.part(index * SEGMENT_BYTES, SEGMENT_BYTES)?;
        let segment = Segment { address: header.u64(16)?, offset: header.u64(8)?, length: header.u64(32)? };
        match header.u32(0)? {
            PT_LOAD => dynamic.segments.push(segment),
            PT_DYNAMIC => section = Some(file.part(segment.offset, segment.length)?),
            _ => {}
        }
    }
    let Some(section) = section else { return Ok(None) };
    for at in 0..section.len() / ENTRY_BYTES {
        let entry = (section.u64(at * ENTRY_BYTES)?, section.u64(at * ENTRY_BYTES + 8)?);
        if entry.0 == tag::NULL {
            break;
        }
        dynamic.entries.push(entry);
    }
    Ok(Some(dynamic))
}
