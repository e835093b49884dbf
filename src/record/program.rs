//! Whether a program can be tapped at all: dynamically linked, for this machine, not privileged.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::Way;
use crate::error::{Error, Result};
use crate::files;
use parity_graph::weights::TOKEN_EMBD;
use parity_imports::{Format, Machine, imports};

/// A program that can be tapped.
#[derive(Clone, Debug)]
pub struct Program {
    /// The file that is executed.
    pub path: PathBuf,
    /// The ELF file behind it, after the interpreters of scripts.
    pub binary: PathBuf,
}

/// Scripts may name interpreters that are scripts; Linux follows four of them.
const MOST_INTERPRETERS: usize = 4;
const ELF_MAGIC: &[u8] = b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
/// The machine that this is built for, as ELF has it.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
const PT_INTERP: u32 = 3;
const PROGRAM_HEADER_BYTES: usize = 56;

impl Program {
    /// Finds and checks the program of a command line.
    ///
    /// # Errors
    /// Says why it cannot be tapped, and what to do instead.
    pub fn find(command: &[OsString], way: Way) -> Result<Program> {
        let program = Program::named(command)?;
        program.check(way)?;
        Ok(program)
    }

    /// The program of a command line, whether or not it can be tapped.
    ///
    /// # Errors
    /// One that is not there.
    pub fn named(command: &[OsString]) -> Result<Program> {
        let name = command.first().ok_or_else(|| {
            Error::new("parity record", "no program given")
                .hint("parity record -o DIR -- llama-completion -m MODEL -p PROMPT -n 8")
        })?;
        let path = search(name)?;
        let mut binary = path.clone();
        for _ in 0..MOST_INTERPRETERS {
            match interpreter(&binary)? {
                Some(next) => binary = next,
                None => return Ok(Program { path, binary }),
            }
        }
        Err(Error::file(&path, "is a script whose interpreter is a script whose interpreter is a script …"))
    }

    /// Whether the recorder can get into it so.
    ///
    /// # Errors
    /// Says why it cannot, and what to do instead.
    pub fn check(&self, way: Way) -> Result<()> {
        check(&self.path, &self.binary, way)
    }

    /// Whether the file holds llama.cpp itself, which then cannot be tapped.
    pub fn contains_llama(&self) -> bool {
        let Ok(file) = File::open(&self.binary) else { return false };
        // SAFETY: a file that changes meanwhile would at worst give another answer to this question.
        let Ok(map) = (unsafe { memmap2::Mmap::map(&file) }) else { return false };
        let part = TOKEN_EMBD.as_bytes();
        map.windows(part.len()).any(|window| window == part)
            && map.windows(5).any(|window| window == b"ggml_")
    }
}

/// The file that a command name means.
fn search(name: &OsStr) -> Result<PathBuf> {
    let direct = Path::new(name);
    if name.as_encoded_bytes().contains(&b'/') {
        if !direct.is_file() {
            return Err(Error::file(direct, "no such program"));
        }
        return Ok(direct.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let executable = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|meta| meta.is_file() && files::mode(&meta) & 0o111 != 0)
    };
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(executable).ok_or_else(|| {
        Error::file(direct, "no such program on the PATH")
            .hint("give its path, e.g. ./build/bin/llama-completion")
    })
}

fn start_of(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    file.take(4096).read_to_end(&mut bytes).map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    Ok(bytes)
}

/// The interpreter that the first line of a script names.
fn interpreter(path: &Path) -> Result<Option<PathBuf>> {
    let bytes = start_of(path)?;
    let Some(line) = bytes.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let mut words = words.filter_map(|word| std::str::from_utf8(word).ok()).map(OsStr::new);
    let program = words.next().ok_or_else(|| Error::file(path, "a script that names no interpreter"))?;
    // `#!/usr/bin/env python3`: what counts is the program that `env` looks up.
    let looked_up = (Path::new(program).file_name() == Some(OsStr::new("env")))
        .then(|| words.find(|word| !word.as_encoded_bytes().starts_with(b"-")))
        .flatten();
    search(looked_up.unwrap_or(program)).map(Some)
}

/// Whether a library can be loaded into this ELF file.
fn check(path: &Path, binary: &Path, way: Way) -> Result<()> {
    let bytes = start_of(binary)?;
    let refuse = |what: &str, hint: &str| {
        let subject = if path == binary {
            path.display().to_string()
        } else {
            format!("{} ({})", path.display(), binary.display())
        };
        Err(Error::new(subject, "cannot be recorded")
            .expected(format!(
                "a dynamically linked 64-bit program of {} for {}",
                std::env::consts::OS,
                std::env::consts::ARCH
            ))
            .found(what)
            .hint(hint))
    };
    const OTHERS: &str = "record another program of the same llama.cpp, build one with shared libraries, or let a ggml-rpc-server \
         compute for it: parity record --rpc";
    if cfg!(target_os = "macos") {
        return match (way, is_of_macos(binary)) {
            (Way::Loaded, true) => Ok(()),
            (Way::Loaded, false) => refuse("a file that is no such program", OTHERS),
            (Way::Preloaded, _) => refuse("a system that preloads nothing", "parity record --load"),
        };
    }
    if bytes.len() < 64 || !bytes.starts_with(ELF_MAGIC) {
        return refuse("a file that is no ELF program", OTHERS);
    }
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    if bytes[4] != CLASS_64 {
        return refuse("a 32-bit program", OTHERS);
    }
    if bytes[5] != LITTLE_ENDIAN || half(18) != MACHINE {
        return refuse("a program for another kind of machine", OTHERS);
    }
    let Some(loader) = loader(binary, &bytes) else {
        return refuse(
            "a statically linked program, into which nothing can be loaded",
            "build llama.cpp with -DBUILD_SHARED_LIBS=ON, use `parity record -m MODEL -p PROMPT` (feature llama-cpp), or let a \
             ggml-rpc-server compute for it: parity record --rpc",
        );
    };
    if loader.contains("musl") && !cfg!(target_env = "musl") {
        return refuse("a program for musl, while this parity is built for glibc", OTHERS);
    }
    let mode = fs::metadata(binary).map_or(0, |meta| files::mode(&meta));
    if mode & 0o6000 != 0 && way == Way::Preloaded {
        return refuse(
            "a set-user-ID program, which ignores LD_PRELOAD",
            "run a copy of it without that bit, or have ggml load the recorder: parity record --load",
        );
    }
    Ok(())
}

/// Whether a file is a program of macOS for this machine that loads libraries.
fn is_of_macos(binary: &Path) -> bool {
    let Ok(file) = File::open(binary) else { return false };
    // SAFETY: a file that changes meanwhile would at worst give another answer to this question.
    let Ok(map) = (unsafe { memmap2::Mmap::map(&file) }) else { return false };
    let found = Machine::HOST.and_then(|machine| imports(&map, machine).ok());
    found.is_some_and(|found| found.format == Format::MachO && !found.libraries.is_empty())
}

/// The dynamic loader that a 64-bit little-endian ELF file asks for; `None` for a static one.
fn loader(path: &Path, start: &[u8]) -> Option<String> {
    let long = |bytes: &[u8], at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let offset = long(start, 32)?;
    let count = usize::from(u16::from_le_bytes([start[56], start[57]]));
    let mut file = File::open(path).ok()?;
    let mut headers = vec![0; count * PROGRAM_HEADER_BYTES];
    file.seek(SeekFrom::Start(offset)).ok()?;
    file.read_exact(&mut headers).ok()?;
    let header = headers
        .chunks_exact(PROGRAM_HEADER_BYTES)
        .find(|header| u32::from_le_bytes([header[0], header[1], header[2], header[3]]) == PT_INTERP)?;
    let (at, length) = (long(header, 8)?, long(header, 32)?.min(4096));
    let mut name = vec![0; usize::try_from(length).ok()?];
    file.seek(SeekFrom::Start(at)).ok()?;
    file.read_exact(&mut name).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
}
