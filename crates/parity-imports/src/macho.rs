//! Mach-O, of macOS: slots are words that the loader binds to a symbol, as a list of instructions says (`opcodes`) or as the
//! words themselves do (`chained`).

use crate::bytes::Bytes;
use crate::{Format, Found, Imports, Machine, Result, Unreadable, chained, opcodes};

const FAT: [u8; 4] = [0xca, 0xfe, 0xba, 0xbe];
const FAT_BYTES: u64 = 20;
const HEADER_BYTES: u64 = 32;
/// The kind of ARM whose words are signed: what is put into them would have to be, too.
const SIGNED: u32 = 2;

/// Kinds of commands.
mod command {
    pub const SEGMENT: u32 = 0x19;
    pub const LOAD: u32 = 0xc;
    pub const LOAD_WEAK: u32 = 0x8000_0018;
    pub const REEXPORT: u32 = 0x8000_001f;
    pub const FOLDER: u32 = 0x8000_001c;
    pub const DYLD_INFO: u32 = 0x22;
    pub const DYLD_INFO_ONLY: u32 = 0x8000_0022;
    pub const CHAINED: u32 = 0x8000_0034;
}

/// A part of the file and where it lies when it is loaded, from the header on.
#[derive(Clone, Copy)]
pub struct Segment {
    /// From the header.
    pub address: u64,
    /// In the file.
    pub offset: u64,
    /// In the file.
    pub length: u64,
}

/// The name of a symbol of C, which has a line before it.
pub fn plain(name: Option<&str>) -> Option<&str> {
    name?.strip_prefix('_')
}

/// What its commands say of a file.
#[derive(Default)]
struct Commands<'a> {
    /// With addresses as they are written, and the address of the header.
    segments: Vec<Segment>,
    header: Option<u64>,
    libraries: Vec<&'a str>,
    folders: Vec<&'a str>,
    /// Lists of instructions: those at the start, of weak symbols, of first uses.
    lists: Vec<Bytes<'a>>,
    chained: Option<Bytes<'a>>,
}

/// The imports of a file, or of the part of a universal one that is for this kind of processor.
pub fn imports(file: Bytes<'_>, machine: Machine) -> Result<Imports<'_>> {
    let number = match machine {
        Machine::X86_64 => 0x0100_0007,
        Machine::Aarch64 => 0x0100_000c,
    };
    let file = if file.0.starts_with(&FAT) { part_for(file, number)? } else { file };
    if file.0.starts_with(&FAT) || file.u32(4)? != number {
        return Err(Unreadable("it is for another kind of processor"));
    }
    if machine == Machine::Aarch64 && file.u32(8)? & 0xff == SIGNED {
        return Err(Unreadable("its addresses are signed (arm64e)"));
    }
    let mut commands = commands(file)?;
    let header = commands.header.unwrap_or(0);
    for segment in &mut commands.segments {
        segment.address = segment.address.wrapping_sub(header);
    }
    let mut found = Found::new(file);
    for list in &commands.lists {
        opcodes::slots(*list, &commands.segments, &mut found)?;
    }
    if let Some(fixups) = commands.chained {
        chained::slots(fixups, file, &commands.segments, &mut found)?;
    }
    let Commands { libraries, folders, .. } = commands;
    Ok(Imports { format: Format::MachO, libraries, folders, slots: found.slots })
}

/// The part of a universal file that is for this kind of processor.
fn part_for(file: Bytes<'_>, number: u32) -> Result<Bytes<'_>> {
    for index in 0..u64::from(file.u32_big(4)?) {
        let entry = file.part(8 + index * FAT_BYTES, FAT_BYTES)?;
        if entry.u32_big(0)? == number {
            return file.part(u64::from(entry.u32_big(8)?), u64::from(entry.u32_big(12)?));
        }
    }
    Err(Unreadable("it is for other kinds of processors"))
}

fn commands(file: Bytes<'_>) -> Result<Commands<'_>> {
    let (count, mut rest) = (file.u32(16)?, file.part(HEADER_BYTES, u64::from(file.u32(20)?))?);
    let mut found = Commands::default();
    for _ in 0..count {
        let length = u64::from(rest.u32(4)?);
        if length < 8 {
            return Err(Unreadable("it has a command without a length"));
        }
        let command = rest.part(0, length)?;
        rest = rest.from(length)?;
        let listed = |at: u64| file.part(u64::from(command.u32(at)?), u64::from(command.u32(at + 4)?));
        match command.u32(0)? {
            command::SEGMENT => {
                let [address, offset, length] = [command.u64(24)?, command.u64(40)?, command.u64(48)?];
                // The header is the start of the file, and of the segment that it begins with.
                if offset == 0 && length > 0 {
                    found.header = found.header.or(Some(address));
                }
                found.segments.push(Segment { address, offset, length });
            }
            command::LOAD | command::LOAD_WEAK | command::REEXPORT => {
                found.libraries.extend(command.name(u64::from(command.u32(8)?)));
            }
            command::FOLDER => found.folders.extend(command.name(u64::from(command.u32(8)?))),
            command::DYLD_INFO | command::DYLD_INFO_ONLY => {
                for at in [16, 24, 32] {
                    found.lists.push(listed(at)?);
                }
            }
            command::CHAINED => found.chained = Some(listed(8)?),
            _ => {}
        }
    }
    Ok(found)
}
