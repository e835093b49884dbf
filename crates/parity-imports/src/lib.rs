//! Where the imports of a program or shared library lie: the words that the system's loader fills with the addresses of other
//! libraries' functions, by name.
//!
//! Everything here is a function on bytes, the same on every system: files of Linux, macOS and Windows are read on any of
//! them. What is read is checked before it is used; a file that is no library, or not as it should be, is an error.

mod bytes;

mod elf;
mod macho;
mod pe;

mod chained;
mod opcodes;

use std::fmt;

use bytes::Bytes;

/// A kind of processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// x86 of 64 bits.
    X86_64,
    /// ARM of 64 bits.
    Aarch64,
}

impl Machine {
    /// The kind that this is built for; `None` where it is another.
    pub const HOST: Option<Machine> = if cfg!(target_arch = "x86_64") {
        Some(Machine::X86_64)
    } else if cfg!(target_arch = "aarch64") {
        Some(Machine::Aarch64)
    } else {
        None
    };
}

/// A format of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Of Linux and Android.
    Elf,
    /// Of macOS.
    MachO,
    /// Of Windows.
    Pe,
}

/// A word of the loaded library that holds the address of a function or object of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot<'a> {
    /// What is imported, as C spells it.
    pub name: &'a str,
    /// Where the word lies, counted from where the loader puts the library: the load bias of ELF, the header of Mach-O and
    /// the module of PE.
    pub offset: u64,
}

/// What a program or library takes from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imports<'a> {
    /// The file's format.
    pub format: Format,
    /// The libraries that it asks for, as it names them.
    pub libraries: Vec<&'a str>,
    /// Folders in which it has them looked for, as it names them: by `:` of ELF, with `$ORIGIN` or `@loader_path` for its own.
    pub folders: Vec<&'a str>,
    /// Its slots, in the order of the file. Of a name there may be several.
    pub slots: Vec<Slot<'a>>,
}

/// Why a file cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable(&'static str);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Unreadable {}

/// What is read of a file, or why it is not.
pub type Result<T> = std::result::Result<T, Unreadable>;

/// Bytes of a slot.
const WORD: u64 = 8;

/// The imports of a file, as a processor of that kind loads it.
///
/// Names that are no text or longer than any of C are left out, and so are slots for an address within something.
///
/// # Errors
/// Bytes that are no such file, a file for another processor, or one that is not as its format has it.
pub fn imports(file: &[u8], machine: Machine) -> Result<Imports<'_>> {
    let bytes = Bytes(file);
    match file {
        [0x7f, b'E', b'L', b'F', ..] => elf::imports(bytes, machine),
        [b'M', b'Z', ..] => pe::imports(bytes, machine),
        [0xcf, 0xfa, 0xed, 0xfe, ..] | [0xca, 0xfe, 0xba, 0xbe, ..] => macho::imports(bytes, machine),
        _ => Err(Unreadable("it is neither ELF, Mach-O nor PE of 64 bits")),
    }
}

/// Slots as they are found: never more than the file has room for, whatever it says of itself.
struct Found<'a> {
    slots: Vec<Slot<'a>>,
    room: u64,
}

impl<'a> Found<'a> {
    fn new(file: Bytes<'a>) -> Found<'a> {
        Found { slots: Vec::new(), room: file.len() / WORD }
    }

    /// One more slot, whether or not its name can be read.
    fn push(&mut self, name: Option<&'a str>, offset: u64) -> Result<()> {
        self.room = self.room.checked_sub(1).ok_or(Unreadable("it has more imports than room for them"))?;
        self.slots.extend(name.map(|name| Slot { name, offset }));
        Ok(())
    }
}
