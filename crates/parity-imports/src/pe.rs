//! PE, of Windows: slots are the words of import address tables, those that the loader fills and those that are filled when
//! they are used first.

use crate::bytes::Bytes;
use crate::{Format, Found, Imports, Machine, Result, Unreadable, WORD};

const MAGIC_64: u16 = 0x20b;
const HEADER_AT: u64 = 0x3c;
const SECTION_BYTES: u64 = 40;
const MOST_SECTIONS: u64 = 96;
const DESCRIPTOR_BYTES: u64 = 20;
const DELAYED_BYTES: u64 = 32;
/// Places in the list of directories.
const IMPORTS: u32 = 1;
const DELAYED: u32 = 13;
/// The bit of an import that has a number in the place of a name.
const BY_NUMBER: u64 = 1 << 63;

/// A part of the file and where it lies when it is loaded.
struct Section {
    address: u64,
    offset: u64,
    length: u64,
}

/// The file, by addresses.
struct Loaded<'a> {
    file: Bytes<'a>,
    sections: Vec<Section>,
}

impl<'a> Loaded<'a> {
    /// The file from an address on.
    fn at(&self, address: u64) -> Result<Bytes<'a>> {
        let holds =
            |section: &&Section| address.checked_sub(section.address).is_some_and(|at| at < section.length);
        let section = self
            .sections
            .iter()
            .find(holds)
            .ok_or(Unreadable("it names an address that it does not have"))?;
        self.file.part(section.offset, section.length)?.from(address - section.address)
    }

    /// The slots of one library: names in one table, or in the slots themselves where there is no other.
    fn slots(&self, names: u32, slots: u32, found: &mut Found<'a>) -> Result<()> {
        let table = self.at(u64::from(if names == 0 { slots } else { names }))?;
        for at in (0..).map(|index: u64| index * WORD) {
            let name = table.u64(at)?;
            if name == 0 {
                return Ok(());
            }
            let by_name = name & BY_NUMBER == 0;
            // Two bytes before it are a hint where the name is in the other's table.
            let text = if by_name { self.at(name & 0x7fff_ffff)?.name(2) } else { None };
            found.push(text, u64::from(slots) + at)?;
        }
        Ok(())
    }
}

/// The imports of a file.
pub fn imports(file: Bytes<'_>, machine: Machine) -> Result<Imports<'_>> {
    let header = file.from(u64::from(file.u32(HEADER_AT)?))?;
    let number = match machine {
        Machine::X86_64 => 0x8664,
        Machine::Aarch64 => 0xaa64,
    };
    if header.part(0, 4)?.0 != b"PE\0\0" {
        return Err(Unreadable("it is a program of DOS"));
    }
    // Optional only in name: its length stands before it, and sections behind it.
    let (sections, length) = (u64::from(header.u16(6)?), u64::from(header.u16(20)?));
    let optional = header.part(24, length)?;
    if header.u16(4)? != number || optional.u16(0)? != MAGIC_64 {
        return Err(Unreadable("it is for another kind of processor"));
    }
    if sections > MOST_SECTIONS {
        return Err(Unreadable("it has more sections than Windows loads"));
    }
    let section = |index: u64| {
        let section = header.part(24 + length + index * SECTION_BYTES, SECTION_BYTES)?;
        let [address, length, offset] = [section.u32(12)?, section.u32(16)?, section.u32(20)?].map(u64::from);
        Ok(Section { address, offset, length })
    };
    let loaded = Loaded { file, sections: (0..sections).map(section).collect::<Result<_>>()? };
    let directory = |number: u32| {
        let there = number < optional.u32(108)?;
        let address = if there { optional.u32(112 + 8 * u64::from(number))? } else { 0 };
        if address == 0 { Ok(Bytes(&[][..])) } else { loaded.at(u64::from(address)) }
    };
    let (mut libraries, mut found) = (Vec::new(), Found::new(file));
    let table = directory(IMPORTS)?;
    // The last descriptor is all zeros; a table that is not there has none.
    for at in (0..table.len() / DESCRIPTOR_BYTES).map(|index| index * DESCRIPTOR_BYTES) {
        let (names, name, slots) = (table.u32(at)?, table.u32(at + 12)?, table.u32(at + 16)?);
        if name == 0 || slots == 0 {
            break;
        }
        libraries.extend(loaded.at(u64::from(name))?.name(0));
        loaded.slots(names, slots, &mut found)?;
    }
    let table = directory(DELAYED)?;
    for at in (0..table.len() / DELAYED_BYTES).map(|index| index * DELAYED_BYTES) {
        let (name, slots, names) = (table.u32(at + 4)?, table.u32(at + 12)?, table.u32(at + 16)?);
        if name == 0 || slots == 0 {
            break;
        }
        libraries.extend(loaded.at(u64::from(name))?.name(0));
        loaded.slots(names, slots, &mut found)?;
    }
    Ok(Imports { format: Format::Pe, libraries, folders: Vec::new(), slots: found.slots })
}
