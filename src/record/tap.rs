//! The library that is loaded into the program, and the folder through which it reports.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use lzma_rust2::XzReader;
use tempfile::TempDir;

use super::{Options, Way};
use crate::error::{Error, Result};
use crate::memory;

/// The tap's shared library, compressed by build.rs; empty where it could not be built for this machine.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libparity_tap.so.xz"));

/// Whether there is a library for this machine.
pub fn is_built() -> bool {
    !LIBRARY.is_empty()
}

/// Room for the tap's words, written ahead so that a full disk cannot keep them back.
const STATUS_BYTES: usize = 1 << 16;

/// Bytes of each of the two words in which the tap counts passes: those that were computed, and those of them that are written.
const WORD: usize = 8;

/// The variable by which ggml is told to load a library with its backends.
const BACKEND: &str = "GGML_BACKEND_PATH";

/// Part of the memory that is there which kept nodes may take: what is read of them goes to disk through as much again, and
/// the program has weights and caches.
const SHARE_KEPT: u64 = 3;

/// One use of the tap.
pub struct Session {
    folder: TempDir,
    library: PathBuf,
}

/// What the tap said.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Models that were opened, in order, each once.
    pub models: Vec<PathBuf>,
    /// Folders of the recordings that have begun, one for each context, each once.
    pub recordings: Vec<PathBuf>,
    /// Token sequences seen.
    pub sequences: usize,
    /// The mistake that was injected, in a sentence.
    pub injected: Option<String>,
    /// The ggml that computed.
    pub library: Option<PathBuf>,
    /// What the recorder stands in for since ggml has loaded it; `None` where ggml has not.
    pub loaded: Option<String>,
    /// Tokens that the program chose where another run's were computed, by position.
    pub replaced: Vec<(u32, u32)>,
    /// Why recording stopped early.
    pub stopped: Option<String>,
    /// Passes that were computed and are not written: the program ended too suddenly.
    pub unwritten: u64,
}

impl Session {
    /// Lays the library ready.
    pub fn new(way: Way) -> Result<Session> {
        if let (Way::Loaded, Some(other)) = (way, std::env::var_os(BACKEND)) {
            return Err(Error::new("--load", format!("{BACKEND} is set already"))
                .expected("none: ggml loads one library that is named so, and that has to be the recorder")
                .found(other.display())
                .hint(format!("record without --load, or with {BACKEND} unset")));
        }
        if !is_built() {
            return Err(Error::new("parity record", "this build has no tap for this machine")
                .expected("Linux on x86-64 or ARM of 64 bits, built on the machine that it is built for")
                .found(format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH))
                .hint("record on such a machine, and copy the dump: it is the same everywhere"));
        }
        let failed =
            |e: std::io::Error| Error::file(&std::env::temp_dir(), format!("cannot be written to: {e}"));
        let folder = tempfile::Builder::new().prefix("parity-").tempdir().map_err(failed)?;
        let library = folder.path().join("libparity_tap.so");
        let mut bytes = Vec::new();
        XzReader::new(LIBRARY, false).read_to_end(&mut bytes).map_err(failed)?;
        fs::write(&library, bytes).map_err(failed)?;
        fs::write(folder.path().join("status"), vec![0; STATUS_BYTES]).map_err(failed)?;
        fs::write(folder.path().join("passes"), [0; 2 * WORD]).map_err(failed)?;
        Ok(Session { folder, library })
    }

    /// The folder that is shared with the tap.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The program with the tap in it: recording, or only noting hashes where `options` say so.
    ///
    /// # Errors
    /// A folder of the system's that cannot be written to.
    pub fn command(&self, command: &[OsString], options: &Options, hashes: Option<&Path>) -> Result<Command> {
        let mut tapped = self.bare(command, options);
        tapped.env("PARITY_TAP_DIR", absolute(&options.dir));
        tapped.env("PARITY_TAP_FILTER", options.filter.to_string());
        options.sequence.map(|number| tapped.env("PARITY_TAP_SEQUENCE", number.to_string()));
        tapped.env("PARITY_TAP_ALL_ROWS", if options.all_rows { "1" } else { "0" });
        tapped.env("PARITY_TAP_OBSERVE", options.observe.to_string());
        if let Some((_, bytes)) = memory::available()? {
            tapped.env("PARITY_TAP_MEMORY", (bytes / SHARE_KEPT).to_string());
        }
        tapped.env("PARITY_TAP_HASHED", if options.hashed { "1" } else { "0" });
        if let Some(forced) = &options.forced {
            let file = self.folder().join("forced");
            fs::write(&file, forced.to_string())
                .map_err(|e| Error::file(&file, format!("cannot be written: {e}")))?;
            tapped.env("PARITY_TAP_FORCED", file);
        }
        if let Some(inject) = &options.inject {
            tapped.env("PARITY_TAP_INJECT", inject.to_string());
        }
        if let Some(graphs) = &options.graphs {
            // Passes are appended, of this recording alone.
            let _ = fs::remove_file(graphs);
            tapped.env("PARITY_TAP_GRAPHS", absolute(graphs));
        }
        if let Some(hashes) = hashes {
            tapped.env("PARITY_TAP_HASHES", hashes);
        }
        Ok(tapped)
    }

    /// The program as it is, but for a note of its logits taken after each pass: no node is asked for, and
    /// no row is added unless `all_rows` says so.
    pub fn untouched(
        &self,
        command: &[OsString],
        options: &Options,
        all_rows: bool,
        hashes: &Path,
    ) -> Command {
        // The first run owns the shared folder.
        let _ = fs::remove_file(self.folder().join("owner"));
        let mut noted = self.bare(command, options);
        noted.env("PARITY_TAP_HASHES", hashes);
        options.sequence.map(|number| noted.env("PARITY_TAP_SEQUENCE", number.to_string()));
        noted.env("PARITY_TAP_ALL_ROWS", if all_rows { "1" } else { "0" });
        noted
    }

    fn bare(&self, command: &[OsString], options: &Options) -> Command {
        let mut bare = Command::new(&command[0]);
        bare.args(&command[1..]);
        bare.envs(options.environment.iter().map(|(key, value)| (key, value)));
        match options.way {
            Way::Preloaded => bare.env("LD_PRELOAD", self.preload()),
            Way::Loaded => bare.env(BACKEND, &self.library),
        };
        bare.env("PARITY_TAP_SHARED", self.folder());
        bare
    }

    /// The library, before those that the user preloads.
    fn preload(&self) -> OsString {
        let mut preload = self.library.clone().into_os_string();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(OsStr::new(":"));
            preload.push(others);
        }
        preload
    }

    /// Passes that were computed and are not written.
    fn unwritten(&self) -> u64 {
        let bytes = fs::read(self.folder().join("passes")).unwrap_or_default();
        let word = |word: &[u8]| word.try_into().map_or(0, u64::from_le_bytes);
        let mut words = bytes.chunks_exact(WORD).map(word);
        words.next().unwrap_or(0).saturating_sub(words.next().unwrap_or(0))
    }

    /// What the tap said so far.
    pub fn report(&self) -> Report {
        let bytes = fs::read(self.folder().join("status")).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let mut report = Report { unwritten: self.unwritten(), ..Report::default() };
        for line in text.trim_end_matches('\0').lines() {
            let Some((key, value)) = line.split_once(' ') else { continue };
            match key {
                "model" if !report.models.iter().any(|known| known == Path::new(value)) => {
                    report.models.push(value.into());
                }
                "recording" if !report.recordings.iter().any(|known| known == Path::new(value)) => {
                    report.recordings.push(value.into());
                }
                "sequences" => {
                    report.sequences =
                        value.parse().map_or(report.sequences, |seen: usize| seen.max(report.sequences));
                }
                "library" => report.library = Some(value.into()),
                "loaded" => report.loaded = Some(value.to_owned()),
                "replaced" => report.replaced.extend(replaced(value)),
                "injected" => report.injected = Some(value.to_owned()),
                "stopped" => report.stopped = Some(value.to_owned()),
                _ => {}
            }
        }
        report
    }
}

/// A position and the token that the program chose there.
fn replaced(value: &str) -> Option<(u32, u32)> {
    let (position, token) = value.split_once(' ')?;
    Some((position.parse().ok()?, token.parse().ok()?))
}

/// The program may change its folder before it computes.
pub(super) fn absolute(dir: &Path) -> PathBuf {
    std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned())
}
