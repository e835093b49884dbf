//! What is asked of a recording, and where it is at home.

use std::path::PathBuf;

use parity_dump::CONTEXT;

use crate::filter::Filter;
use crate::forced::Forced;
use crate::kept::Observe;
use parity_graph::fault::Wanted;

/// What is to be recorded.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder of the dump; `None` where only hashes are wanted.
    pub dir: Option<PathBuf>,
    /// Which checkpoints.
    pub filter: Filter,
    /// Which token sequence alone, counted from 0; `None` where there should be only one.
    pub sequence: Option<usize>,
    /// How closely is looked.
    pub observe: Observe,
    /// Bytes that the nodes of a graph may take when they are kept; `None` for as many as the library gets.
    pub memory: Option<u64>,
    /// Whether hashes and norms are kept in the place of values.
    pub hashed: bool,
    /// File that takes a hash of each row of logits.
    pub hashes: Option<PathBuf>,
    /// File that takes the graph of each pass as text.
    pub graphs: Option<PathBuf>,
    /// A mistake that llama.cpp is made to make, as a test aid.
    pub inject: Option<Wanted>,
    /// Tokens of another run, in the place of those that the program chooses.
    pub forced: Option<Forced>,
    /// llama.cpp's version.
    pub version: Option<String>,
}

/// The folder, within that of a recording, of the context that computed as number `number`, counted from 0: any but the first.
pub fn another(number: usize) -> String {
    format!("{CONTEXT}{number}")
}

/// Where the recorder is at home.
pub trait Host: Send + Sync {
    /// Tells the user something.
    fn say(&self, message: &str);
    /// Tells the parent process `key` and `value`.
    fn status(&self, key: &str, value: &str);
    /// Whether this process is the one that is recorded: the first that asks.
    fn claim(&self) -> bool;
    /// A pass was computed, whose values are on their way to disk.
    fn computed(&self) {}
    /// The values of such a pass are there, or never will be.
    fn written(&self) {}
    /// Why values that were read since the pass began are none, where the way to them broke.
    fn broken(&self) -> Option<String> {
        None
    }
}
