//! Values on their way to disk: copied into a bounded set of buffers, written by a thread of its own.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parity_dump::hashes::HASHES;
use parity_dump::{Checkpoint, DumpError, Element, Life, Manifest, Writer};

#[cfg(not(unix))]
use crate::elsewhere::without_signals;
use crate::gather::Piece;
use crate::hashing::StepHashes;
use crate::options::Host;
use crate::plan::PassPlan;
use crate::region::Bytes;

/// Bytes of one buffer: large enough that a write is worth its system call, small enough to stay in cache.
pub const BUFFER_BYTES: usize = 2 << 20;
/// How many buffers there are at most: who fills faster than the disk takes has to wait.
const BUFFERS: usize = 32;
/// Bytes from which on tensors are written as they lie in the program's memory: all buffers would not hold more, so that it has to
/// wait for the disk in any case. Large pages for that memory (`MADV_HUGEPAGE`) were tried, and cost more than they save.
pub const LENT_FROM: usize = BUFFERS * BUFFER_BYTES;

/// What the next bytes are.
#[derive(Clone, Debug)]
pub enum Announced {
    /// The values of a checkpoint.
    Checkpoint {
        /// Checkpoint id.
        checkpoint: Checkpoint,
        /// Element type.
        element: Element,
        /// Slowest axis first.
        shape: Arc<[usize]>,
        /// Positions of its rows where these are not all of the step's.
        rows: Option<Vec<u32>>,
    },
    /// An input of the step.
    Leaf {
        /// Name without prefix.
        name: String,
        /// As safetensors names it.
        dtype: &'static str,
        /// Slowest axis first.
        shape: Vec<usize>,
        /// How many bytes follow.
        bytes: usize,
    },
}

enum Job {
    Begin {
        tokens: Vec<u32>,
        positions: Vec<u32>,
        life: Life,
        tensors: usize,
    },
    /// Used bytes of a buffer, and the tensors that begin within it.
    Bytes {
        buffer: Vec<u8>,
        used: usize,
        begins: Vec<(usize, Announced)>,
    },
    /// Values that were gathered, and the tensors that begin within them.
    Gathered {
        piece: Piece,
        begins: Vec<(usize, Announced)>,
    },
    /// Tensors that the program lends, which waits until they are written.
    Lent(Vec<(Announced, Bytes)>),
    NoRows(Checkpoint),
    /// The open step is computed by the graph with this number; one with a text is new.
    Graph {
        number: usize,
        text: Option<String>,
    },
    End,
    Discard,
    Edit(Box<dyn FnOnce(&mut Manifest) + Send>),
    /// The recording ends here, and why.
    Stop(String),
    /// Says that everything before has been done.
    Done(Sender<()>),
}

/// Hands steps to the writing thread.
pub struct Store {
    jobs: Option<Sender<Job>>,
    free: Receiver<Vec<u8>>,
    allocated: usize,
    buffer: Vec<u8>,
    used: usize,
    begins: Vec<(usize, Announced)>,
    failure: Arc<OnceLock<DumpError>>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Starts the thread; it writes through `writer`, hashes in the place of values where `hashed`.
    ///
    /// # Errors
    /// The system's, where there is no thread to be had.
    pub fn new(writer: Writer, hashed: bool, host: Arc<dyn Host>) -> std::io::Result<Store> {
        let (jobs, todo) = channel();
        let (give_back, free) = channel();
        let failure = Arc::new(OnceLock::new());
        let noted = Arc::clone(&failure);
        let thread = without_signals(|| {
            std::thread::Builder::new()
                .name("parity-store".to_owned())
                .spawn(move || work(Out::new(writer, hashed), (&todo, &give_back), &noted, &*host))
        })?;
        Ok(Store {
            jobs: Some(jobs),
            free,
            allocated: 1,
            buffer: vec![0; BUFFER_BYTES],
            used: 0,
            begins: Vec::new(),
            failure,
            thread: Some(thread),
        })
    }

    /// Why writing stopped, if it did.
    pub fn failure(&self) -> Option<&DumpError> {
        self.failure.get()
    }

    /// Starts a step of at most `tensors` tensors: the rows of a plan.
    pub fn begin(&mut self, plan: &PassPlan, tensors: usize) {
        let (tokens, positions, life) = (plan.tokens.clone(), plan.positions.clone(), plan.life.clone());
        self.send(Job::Begin { tokens, positions, life, tensors });
    }

    /// Announces the tensor whose bytes come next.
    pub fn announce(&mut self, tensor: Announced) {
        self.begins.push((self.used, tensor));
    }

    /// Takes `bytes` bytes, at most [`BUFFER_BYTES`], that `fill` writes.
    pub fn bytes(&mut self, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) {
        if self.used + bytes > self.buffer.len() {
            self.flush();
        }
        fill(&mut self.buffer[self.used..self.used + bytes]);
        self.used += bytes;
    }

    /// Takes tensors whose values were gathered, with where each begins.
    pub fn gathered(&mut self, piece: Piece, begins: Vec<(usize, Announced)>) {
        self.flush();
        self.send(Job::Gathered { piece, begins });
    }

    /// Writes tensors from where they lie, and waits for it.
    ///
    /// # Safety
    /// All of their bytes may be read, and nobody writes them meanwhile.
    pub unsafe fn lend(&mut self, tensors: Vec<(Announced, Bytes)>) {
        self.flush();
        self.send(Job::Lent(tensors));
        self.settle();
    }

    /// Notes that the step has no row of a checkpoint.
    pub fn no_rows(&mut self, checkpoint: Checkpoint) {
        self.send(Job::NoRows(checkpoint));
    }

    /// Says that the open step is computed by graph `number`, whose text comes along the first time.
    pub fn graph(&mut self, number: usize, text: Option<String>) {
        self.send(Job::Graph { number, text });
    }

    /// Changes the manifest, which is written with the next step.
    pub fn edit(&mut self, change: impl FnOnce(&mut Manifest) + Send + 'static) {
        self.send(Job::Edit(Box::new(change)));
    }

    /// Drops the open step, and writes into the dump that it ends here and why.
    pub fn stop(&mut self, reason: &str) {
        (self.used, self.begins) = (0, Vec::new());
        self.send(Job::Stop(reason.to_owned()));
    }

    /// Finishes the step, or drops it: the program goes on while it is written.
    pub fn end(&mut self, whole: bool) {
        if whole {
            self.flush();
        }
        (self.used, self.begins) = (0, Vec::new());
        self.send(if whole { Job::End } else { Job::Discard });
    }

    /// Waits until the disk has all that was finished.
    pub fn settle(&mut self) {
        let (done, wait) = channel();
        self.send(Job::Done(done));
        // An error means that the thread is gone, and nothing is left to wait for.
        let _ = wait.recv();
    }

    fn flush(&mut self) {
        if self.used == 0 && self.begins.is_empty() {
            return;
        }
        let next = match self.free.try_recv() {
            Ok(buffer) => buffer,
            Err(_) if self.allocated < BUFFERS => {
                self.allocated += 1;
                vec![0; BUFFER_BYTES]
            }
            // All are on their way: the program waits for the disk.
            Err(_) => self.free.recv().unwrap_or_else(|_| vec![0; BUFFER_BYTES]),
        };
        let buffer = std::mem::replace(&mut self.buffer, next);
        let (used, begins) = (std::mem::take(&mut self.used), std::mem::take(&mut self.begins));
        self.send(Job::Bytes { buffer, used, begins });
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // The thread ends only with the channel; were it gone, `failure` would say so.
            let _ = jobs.send(job);
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The writing thread.
fn work(
    mut out: Out,
    (todo, give_back): (&Receiver<Job>, &Sender<Vec<u8>>),
    failure: &OnceLock<DumpError>,
    host: &dyn Host,
) {
    let mut open = false;
    while let Ok(job) = todo.recv() {
        let ends = matches!(job, Job::End);
        match job {
            Job::Done(done) => {
                let _ = done.send(());
            }
            Job::Bytes { buffer, used, begins } => {
                if open && failure.get().is_none() {
                    note(failure, out.bytes(&buffer[..used], begins), &mut out.writer);
                }
                let _ = give_back.send(buffer);
            }
            Job::Gathered { piece, begins } => {
                if open && failure.get().is_none() {
                    note(failure, out.bytes(piece.bytes(), begins), &mut out.writer);
                }
            }
            Job::Lent(tensors) => {
                if open && failure.get().is_none() {
                    note(failure, out.lent(tensors), &mut out.writer);
                }
            }
            Job::Stop(reason) => {
                open = false;
                // Where this fails, there is only the parent process left to say it.
                let _ = out.writer.stop(&reason);
            }
            _ if failure.get().is_some() => {}
            Job::Begin { tokens, positions, life, tensors } => {
                let begun = out.begin((tokens, positions), life, tensors);
                open = begun.is_ok();
                note(failure, begun, &mut out.writer);
            }
            Job::NoRows(checkpoint) if open => out.writer.no_rows(checkpoint),
            Job::Graph { number, text } => {
                // A graph that a dropped step brought along is kept for the next step that it computes.
                if let Some(text) = text {
                    let written = out.writer.graph(&text).map(|_| ());
                    note(failure, written, &mut out.writer);
                }
                if open && failure.get().is_none() {
                    out.writer.step_graph(number);
                }
            }
            Job::End if open => {
                open = false;
                let ended = out.end();
                note(failure, ended, &mut out.writer);
            }
            Job::Discard => {
                open = false;
                out.discard();
            }
            Job::Edit(change) => change(out.writer.manifest_mut()),
            Job::NoRows(_) | Job::End => {}
        }
        if ends {
            host.written();
        }
    }
    out.writer.discard_step();
}

/// Where values go: into the dump, or through a hash.
struct Out {
    writer: Writer,
    hashes: Option<StepHashes>,
    /// (T,) positions of the open step.
    positions: Vec<u32>,
}

impl Out {
    fn new(mut writer: Writer, hashed: bool) -> Out {
        if hashed {
            writer.manifest_mut().requires.push(HASHES.to_owned());
        }
        Out { writer, hashes: hashed.then(StepHashes::default), positions: Vec::new() }
    }

    fn begin(
        &mut self,
        (tokens, positions): (Vec<u32>, Vec<u32>),
        life: Life,
        tensors: usize,
    ) -> Result<(), DumpError> {
        // Of hashes the step's own file holds nothing.
        let tensors = if self.hashes.is_some() { 0 } else { tensors };
        self.writer.begin_step(&tokens, &positions, tensors)?;
        self.positions = positions;
        self.writer.step_life(life);
        Ok(())
    }

    fn bytes(&mut self, bytes: &[u8], begins: Vec<(usize, Announced)>) -> Result<(), DumpError> {
        let Some(hashes) = &mut self.hashes else {
            // A header says where tensors begin: their bytes follow as they lie there, in one write.
            for (_, tensor) in begins {
                match tensor {
                    Announced::Checkpoint { checkpoint, element, shape, rows } => {
                        self.writer.begin_tensor(checkpoint, element, &shape, rows.as_deref());
                    }
                    Announced::Leaf { name, dtype, shape, bytes } => {
                        self.writer.begin_leaf(&name, dtype, &shape, bytes);
                    }
                }
            }
            return self.writer.append(bytes);
        };
        let mut written = 0;
        for (at, tensor) in begins {
            hashes.append(&bytes[written..at]);
            written = at;
            match tensor {
                Announced::Checkpoint { checkpoint, element, shape, rows } => {
                    hashes.begin(checkpoint, element, &shape, rows.as_deref().unwrap_or(&self.positions));
                }
                Announced::Leaf { .. } => hashes.close(),
            }
        }
        hashes.append(&bytes[written..]);
        Ok(())
    }

    /// Tensors from where they lie: who lent them waits.
    fn lent(&mut self, tensors: Vec<(Announced, Bytes)>) -> Result<(), DumpError> {
        tensors.into_iter().try_for_each(|(announced, Bytes { address, bytes })| {
            // SAFETY: by the promise of [`Store::lend`].
            let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
            self.bytes(bytes, vec![(0, announced)])
        })
    }

    fn end(&mut self) -> Result<(), DumpError> {
        if let Some(hashes) = &mut self.hashes {
            let lines = hashes.lines().map_err(|e| DumpError::new(Path::new("hashes"), e))?;
            self.writer.step_hashes(&lines)?;
        }
        self.writer.end_step()
    }

    fn discard(&mut self) {
        self.hashes = self.hashes.take().map(|_| StepHashes::default());
        self.writer.discard_step();
    }
}

/// Keeps the first failure; the step that it happened in makes room again.
fn note(failure: &OnceLock<DumpError>, result: Result<(), DumpError>, writer: &mut Writer) {
    if let Err(error) = result {
        writer.discard_step();
        let _ = failure.set(error);
    }
}

/// Runs `start` with all signals blocked, which a thread started by it inherits: the program's signal
/// handlers go on running on the program's own threads.
#[cfg(unix)]
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are filled before they are read.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let result = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        result
    }
}
