//! Which way of recording fits a program: told by what it and its libraries import, without running it.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};

use parity_imports::{Machine, imports};

use super::Way;
use super::program::Program;
use super::tap;
use crate::error::{Error, Result};

/// A way of recording, and whether it fits.
pub struct Fit {
    /// The way, in words.
    pub way: &'static str,
    /// The command; or why there is none.
    pub command: std::result::Result<String, String>,
}

/// Programs that are known by name, and what there is to know of them.
const KNOWN: &[(&str, &str)] = &[
    (
        "ollama",
        "its child process computes, an upstream llama-server: the recorder is preloaded into that too (ollama serve), and \
         cannot be loaded by ggml, since ollama sets GGML_BACKEND_PATH itself",
    ),
    ("koboldcpp", "llama.cpp is linked into its library: through RPC"),
    (
        "python",
        "xllamacpp: preloaded. llama_cpp (ctypes) looks functions up itself: preloaded, with logits_all=True, since rows cannot \
         be added",
    ),
    ("node", "node-llama-cpp: preloaded, or loaded by ggml"),
];

/// What a program and its libraries show.
#[derive(Default)]
struct Seen {
    /// Whether llama.cpp's functions are called across libraries.
    calls: bool,
    /// Whether ggml is asked to load its backends.
    loads: bool,
    /// Whether devices of a ggml-rpc-server can be added.
    rpc: bool,
}

/// Libraries that are looked at: a program of llama.cpp has a dozen.
const MOST_LIBRARIES: usize = 256;

/// The ways of recording a program, and what is known of it by its name.
///
/// # Errors
/// A program that is not there.
pub fn ways(name: &OsStr) -> Result<(Vec<Fit>, Option<&'static str>)> {
    let program = Program::named(&[name.to_owned()])?;
    let shown = name.to_string_lossy();
    let seen = look(&program.binary);
    let inside = !seen.calls && program.contains_llama();
    let into = |way: Way, flag: &str| {
        if !tap::is_built() {
            return Err("this build has no recorder for this machine".to_owned());
        }
        program.check(way).map_err(|error: Error| error.to_string().replace('\n', "; "))?;
        if inside {
            return Err("llama.cpp is linked into it statically, out of reach".to_owned());
        }
        if way == Way::Loaded && seen.calls && !seen.loads {
            return Err("it does not have ggml load its backends (ggml_backend_load_all)".to_owned());
        }
        let condition = if seen.calls { "" } else { "if it loads llama.cpp as a shared library: " };
        Ok(format!("{condition}parity record {flag}-- {shown} …"))
    };
    let between = || match (seen.rpc, seen.calls) {
        (true, _) => Ok(format!("parity record --rpc [--server HOST:PORT] -- {shown} …")),
        (false, true) => Err("it is not built with ggml's RPC (-DGGML_RPC=ON)".to_owned()),
        (false, false) => {
            Ok(format!("if it can add a ggml-rpc-server's devices: parity record --rpc -- {shown} …"))
        }
    };
    let fits = vec![
        Fit { way: "preloaded", command: into(Way::Preloaded, "") },
        Fit { way: "loaded by ggml", command: into(Way::Loaded, "--load ") },
        Fit { way: "through ggml's RPC", command: between() },
    ];
    let file = Path::new(name).file_name().unwrap_or_default().to_string_lossy();
    Ok((fits, KNOWN.iter().find(|(known, _)| file.starts_with(known)).map(|(_, what)| *what)))
}

/// Looks at a program and at those of its libraries that lie beside it or where it says.
fn look(binary: &Path) -> Seen {
    let mut seen = Seen::default();
    let mut known: BTreeSet<PathBuf> = BTreeSet::new();
    let mut next = VecDeque::from([binary.to_owned()]);
    while let Some(path) = next.pop_front().filter(|_| known.len() < MOST_LIBRARIES) {
        if !known.insert(path.canonicalize().unwrap_or_else(|_| path.clone())) {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        // SAFETY: a file that changes meanwhile would at worst give another answer to this question.
        let Ok(map) = (unsafe { memmap2::Mmap::map(&file) }) else { continue };
        let of = |machine| imports(&map, machine);
        let Ok(found) = of(Machine::X86_64).or_else(|_| of(Machine::Aarch64)) else { continue };
        let takes = |start: &str| found.slots.iter().any(|slot| slot.name.starts_with(start));
        let calls = ["llama_decode", "llama_process", "ggml_backend_sched_graph_compute"]
            .iter()
            .any(|name| takes(name));
        seen.calls |= calls;
        seen.loads |= takes("ggml_backend_load_all");
        const ADDS: &[u8] = b"ggml_backend_rpc_add_server";
        seen.rpc |= calls && map.windows(ADDS.len()).any(|window| window == ADDS);
        let places = folders(&path, &found.folders);
        next.extend(found.libraries.iter().filter_map(|name| held(&places, name)));
    }
    seen
}

/// The folders in which libraries of a file are looked for: its own, that which programs have for them, those that it names.
fn folders(file: &Path, named: &[&str]) -> Vec<PathBuf> {
    let real = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let Some(own) = real.parent() else { return Vec::new() };
    let named = named.iter().flat_map(|names| names.split(':')).filter(|name| !name.is_empty());
    let named = named.map(|name| {
        let within = ["$ORIGIN", "${ORIGIN}", "@loader_path", "@executable_path"]
            .iter()
            .find_map(|of| name.strip_prefix(of));
        within.map_or_else(|| PathBuf::from(name), |rest| own.join(rest.trim_start_matches('/')))
    });
    [own.to_owned(), own.join("../lib")].into_iter().chain(named).collect()
}

/// A library that is asked for by that name.
fn held(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    let name = Path::new(name).file_name()?;
    folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file())
}
