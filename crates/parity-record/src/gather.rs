//! Values of a pass, gathered from a CUDA card at once: to copy each of five hundred tensors by itself takes 10 µs, longer in
//! all than the pass.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null_mut, slice_from_raw_parts};
use std::sync::mpsc::{Receiver, Sender, channel};

#[cfg(not(unix))]
use crate::elsewhere::{loaded, symbol};
use crate::region::Bytes;

/// The kernel.
const GATHER: &str = concat!(include_str!("gather.ptx"), "\0");
/// Bytes of a word that the kernel copies, and of a record of its table.
const WORD: usize = 4;
const RECORD: usize = 16;
/// Records of one launch: the most blocks that a grid has along its second axis.
const RECORDS_MAX: usize = 65_535;
/// Threads of a block, and blocks for a tensor: on an H100 564 tensors of 5.7 MB take 0.12 ms, as long as the bus does; with 16
/// blocks for each 0.37.
const THREADS: c_uint = 256;
const BLOCKS: c_uint = 4;
/// Bytes that one pass may gather: one with more does not wait for the beginnings of copies.
const BYTES_MAX: usize = 64 << 20;
/// How many passes may be on their way to disk.
const PIECES: usize = 8;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`
const MAPPED: c_uint = 3;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, and `CU_MEMORYTYPE_DEVICE`
const MEMORY_TYPE: (c_int, c_int) = (2, 2);
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
const ORDINAL: c_int = 9;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: c_uint = 1;

/// Whether a tensor of a card, or a part of one, without gaps, can be gathered as far as its place goes.
fn fits(source: Bytes) -> bool {
    source.bytes.is_multiple_of(WORD) && source.address.is_multiple_of(WORD)
}

macro_rules! driver {
    ($($field:ident: $symbol:literal fn($($arg:ty),*);)*) => {
        /// The functions of CUDA's driver that are called: each returns 0 where it was done.
        #[derive(Clone, Copy)]
        struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Driver {
            /// Those of the driver that this process has loaded.
            fn loaded() -> Option<Driver> {
                let library = loaded(c"libcuda.so.1")?;
                // SAFETY: functions of the driver, under the names that it declares them by.
                Some(unsafe { Driver {
                    $($field: std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>(symbol(library, $symbol)?),)*
                } })
            }
        }
    };
}

driver! {
    current: c"cuCtxGetCurrent" fn(*mut *mut c_void);
    device: c"cuCtxGetDevice" fn(*mut c_int);
    load: c"cuModuleLoadData" fn(*mut *mut c_void, *const c_void);
    function: c"cuModuleGetFunction" fn(*mut *mut c_void, *mut c_void, *const c_char);
    allocate: c"cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint);
    free: c"cuMemFreeHost" fn(*mut c_void);
    attribute: c"cuPointerGetAttribute" fn(*mut c_void, c_int, usize);
    stream: c"cuStreamCreate" fn(*mut *mut c_void, c_uint);
    launch: c"cuLaunchKernel" fn(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void);
    wait: c"cuStreamSynchronize" fn(*mut c_void);
}

/// A library that this process has loaded already.
#[cfg(unix)]
fn loaded(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a library's name; nothing is loaded that is not there.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!library.is_null()).then_some(library)
}

/// A function of a library.
#[cfg(unix)]
fn symbol(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a library that is loaded.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// The result of a call, where it was done.
fn done(status: c_int) -> Option<()> {
    (status == 0).then_some(())
}

/// Memory of the host that the card sees under the same address.
struct Mapped {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, which one owner has.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

/// Values that were gathered, one after another; their memory goes back when they are written.
pub struct Piece {
    memory: Option<Mapped>,
    used: usize,
    back: Sender<Mapped>,
}

impl Piece {
    /// The values.
    pub fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| {
            // SAFETY: memory of its own, of which so much was written.
            unsafe { &*slice_from_raw_parts(memory.at, self.used) }
        })
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            // Where nobody takes it back, the process is about to end.
            let _ = self.back.send(memory);
        }
    }
}

/// What gathers from the card whose context computes.
struct Card {
    driver: Driver,
    context: usize,
    device: c_int,
    function: *mut c_void,
    stream: *mut c_void,
    table: Mapped,
    free: Receiver<Mapped>,
    back: Sender<Mapped>,
    made: usize,
}

/// Gathers values, where there is a card to gather from.
#[derive(Default)]
pub struct Gather {
    card: Option<Card>,
    failed: bool,
    /// Whether buffers, by where they are, are the card's: as long as a pass lasts.
    kinds: HashMap<usize, bool>,
}

// SAFETY: the driver's handles may be used by any thread whose context is theirs, which is asked each time.
unsafe impl Send for Gather {}

impl Gather {
    /// Whether there is a card, as far as is known.
    pub fn is_possible(&mut self) -> bool {
        if self.card.is_none() && !self.failed {
            self.card = Card::new();
            self.failed = self.card.is_none();
        }
        !self.failed
    }

    /// Whether a source in a buffer can be gathered: it lies in memory of the card whose context is this thread's. A kernel that
    /// reads other memory would end the program.
    pub fn reaches(&mut self, buffer: usize, source: Bytes) -> bool {
        let Some(card) = self.card.as_ref().filter(|_| fits(source)) else { return false };
        *self.kinds.entry(buffer).or_insert_with(|| card.has(source.address))
    }

    /// The values of `sources`, one after another; `None` where they are too many, or it cannot be done: they are then copied one
    /// by one.
    ///
    /// # Safety
    /// Each is reached, and has its values, which nobody writes meanwhile.
    pub unsafe fn gather(&mut self, sources: &[Bytes]) -> Option<Piece> {
        self.kinds.clear();
        let total: usize = sources.iter().map(|source| source.bytes).sum();
        if sources.is_empty() || sources.len() > RECORDS_MAX || total > BYTES_MAX {
            return None;
        }
        // SAFETY: by the caller's promise.
        let piece = self.card.as_mut().and_then(|card| unsafe { card.gather(sources, total) });
        if piece.is_none() {
            // Nothing is tried twice in vain: each pass would pay for it.
            (self.card, self.failed) = (None, true);
        }
        piece
    }
}

impl Card {
    /// The card whose context is this thread's.
    fn new() -> Option<Card> {
        let driver = Driver::loaded()?;
        let (mut context, mut module, mut function, mut stream) =
            (null_mut(), null_mut(), null_mut(), null_mut());
        let mut device = 0;
        // SAFETY: the driver's own functions, which write one word each.
        unsafe {
            done((driver.current)(&raw mut context))?;
            (!context.is_null()).then_some(())?;
            done((driver.device)(&raw mut device))?;
            done((driver.load)(&raw mut module, GATHER.as_ptr().cast()))?;
            done((driver.function)(&raw mut function, module, c"gather".as_ptr()))?;
            done((driver.stream)(&raw mut stream, NON_BLOCKING))?;
        }
        // SAFETY: as above.
        let table = unsafe { driver.mapped(RECORD * RECORDS_MAX) }?;
        let (back, free) = channel();
        Some(Card { driver, context: context as usize, device, function, stream, table, free, back, made: 0 })
    }

    unsafe fn gather(&mut self, sources: &[Bytes], total: usize) -> Option<Piece> {
        let mut context = null_mut();
        // SAFETY: writes one word.
        done(unsafe { (self.driver.current)(&raw mut context) })?;
        if context as usize != self.context {
            return None;
        }
        // SAFETY: the table is long enough for every record.
        let records = unsafe { std::slice::from_raw_parts_mut(self.table.at, RECORD * sources.len()) };
        let mut first = 0;
        for (record, source) in records.chunks_exact_mut(RECORD).zip(sources) {
            record[..8].copy_from_slice(&(source.address as u64).to_ne_bytes());
            record[8..12].copy_from_slice(&((first / WORD) as u32).to_ne_bytes());
            record[12..].copy_from_slice(&((source.bytes / WORD) as u32).to_ne_bytes());
            first += source.bytes;
        }
        let memory = self.memory(total)?;
        let (mut table, mut out) = (self.table.at, memory.at);
        let mut arguments: [*mut c_void; 2] = [(&raw mut table).cast(), (&raw mut out).cast()];
        let n = sources.len() as c_uint;
        // SAFETY: the kernel reads the sources, whose values are there, and writes `total` bytes of the memory, which is larger.
        let launched = unsafe {
            let Driver { launch, wait, .. } = self.driver;
            let shape = (BLOCKS, n, 1, THREADS, 1, 1, 0);
            done(launch(
                self.function,
                shape.0,
                shape.1,
                shape.2,
                shape.3,
                shape.4,
                shape.5,
                shape.6,
                self.stream,
                arguments.as_mut_ptr(),
                null_mut(),
            ))
            .and_then(|()| done(wait(self.stream)))
        };
        let piece = Piece { memory: Some(memory), used: total, back: self.back.clone() };
        launched.map(|()| piece)
    }

    /// Whether an address is of memory of this card.
    fn has(&self, address: usize) -> bool {
        [MEMORY_TYPE, (ORDINAL, self.device)].into_iter().all(|(asked, wanted)| {
            let mut value: c_int = -1;
            // SAFETY: writes one word; any address may be asked about.
            let status = unsafe { (self.driver.attribute)((&raw mut value).cast(), asked, address) };
            done(status).is_some() && value == wanted
        })
    }

    /// Memory for so many bytes: that of a pass which is written, or more; where there is enough on its way, the program waits.
    fn memory(&mut self, bytes: usize) -> Option<Mapped> {
        let memory = match self.free.try_recv() {
            Ok(memory) => memory,
            Err(_) if self.made < PIECES => {
                self.made += 1;
                // SAFETY: a context is current.
                return unsafe { self.driver.mapped(bytes) };
            }
            Err(_) => self.free.recv().ok()?,
        };
        if memory.bytes >= bytes {
            return Some(memory);
        }
        // SAFETY: it came from there, and nobody has it any more.
        unsafe {
            (self.driver.free)(memory.at.cast());
            self.driver.mapped(bytes)
        }
    }
}

impl Driver {
    /// # Safety
    /// A context is current.
    unsafe fn mapped(&self, bytes: usize) -> Option<Mapped> {
        let mut at = null_mut();
        // SAFETY: by the caller's promise; writes one word.
        done(unsafe { (self.allocate)(&raw mut at, bytes, MAPPED) })?;
        Some(Mapped { at: at.cast(), bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_no_driver_is_loaded_nothing_is_gathered() {
        let mut gather = Gather::default();
        assert!(!gather.is_possible());
        let value = 1.0f32;
        let source = Bytes { address: (&raw const value) as usize, bytes: 4 };
        assert!(!gather.reaches(1, source));
        // SAFETY: the value is there.
        assert!(unsafe { gather.gather(&[source]) }.is_none());
    }

    #[test]
    fn words_are_what_is_gathered() {
        let fits = |address, bytes| fits(Bytes { address, bytes });
        assert!(fits(256, 8) && !fits(258, 8) && !fits(256, 6));
    }
}
