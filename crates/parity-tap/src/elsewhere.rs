//! What only other processors and systems than x86-64 and Linux can run: how a function hands on who called it on ARM, and what
//! is loaded on macOS.

/// A function that calls `$to` with its own arguments and its return address as the argument behind `$n` of them.
#[cfg(target_arch = "aarch64")]
macro_rules! hand_on {
    ($n:tt, $to:path) => {
        std::arch::naked_asm!(concat!("mov x", stringify!($n), ", x30"), "b {}", sym $to)
    };
}

/// A function of a pointer and a struct by value, which lies in memory of the caller's that is the function's own: calls
/// `$before(pointer, struct, caller)`, and then what that returns.
#[cfg(target_arch = "aarch64")]
macro_rules! hand_on_struct {
    ($before:path) => {
        std::arch::naked_asm!(
            "stp x29, x30, [sp, #-32]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "mov x2, x30",
            "bl {}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #32",
            "br x16",
            sym $before,
        )
    };
}

/// The program and the libraries of this process.
#[cfg(target_os = "macos")]
pub mod images {
    use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
    use std::fs::File;
    use std::io;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use memmap2::Mmap;

    unsafe extern "C" {
        fn _dyld_image_count() -> u32;
        fn _dyld_get_image_name(index: u32) -> *const c_char;
        fn _dyld_get_image_header(index: u32) -> *const c_void;
    }

    /// Bytes of a header, and in it how many bytes of commands stand behind.
    const HEADER_BYTES: usize = 32;
    const COMMAND_BYTES_AT: usize = 20;

    /// The program, or a library.
    pub struct Image {
        /// The file that it was loaded from.
        pub path: PathBuf,
        header: usize,
    }

    /// All that is loaded from files, in the order in which it was.
    pub fn all() -> Vec<Image> {
        // SAFETY: indices that the loader has; images of llama.cpp are not unloaded meanwhile.
        let image = |index: u32| unsafe {
            let (name, header) = (_dyld_get_image_name(index), _dyld_get_image_header(index));
            let named = !name.is_null() && !header.is_null();
            named.then(|| {
                let path = PathBuf::from(OsStr::from_bytes(CStr::from_ptr(name).to_bytes()));
                Image { path, header: header as usize }
            })
        };
        // SAFETY: a question.
        let count = unsafe { _dyld_image_count() };
        // The system's own libraries have no files.
        (0..count).filter_map(image).filter(|image| image.path.exists()).collect()
    }

    impl Image {
        /// Where a word lies that is so far from the start of the image.
        pub fn address(&self, offset: u64) -> usize {
            self.header.wrapping_add(offset as usize)
        }

        /// The file, if it still is what was loaded.
        pub fn file(&self) -> Result<Mmap, String> {
            let file = File::open(&self.path).map_err(|e| e.to_string())?;
            // SAFETY: a library that is loaded is mapped in any case, and would break in the same way if it were changed.
            let map = unsafe { Mmap::map(&file) }.map_err(|e| e.to_string())?;
            // SAFETY: a header, and the commands that it says stand behind it.
            let header = unsafe {
                let commands = ((self.header + COMMAND_BYTES_AT) as *const u32).read();
                std::slice::from_raw_parts(self.header as *const u8, HEADER_BYTES + commands as usize)
            };
            // In a universal file it is further on.
            let pages = (0..map.len()).step_by(1 << 12);
            let same = pages.into_iter().any(|at| map[at..].starts_with(header));
            if same { Ok(map) } else { Err("the file is another by now".to_owned()) }
        }
    }

    /// Memory that words are put into.
    pub struct Regions;

    impl Regions {
        /// As they are now.
        pub fn read() -> io::Result<Regions> {
            Ok(Regions)
        }

        /// Puts a value into a word, whose page can be written to from then on.
        ///
        /// # Safety
        /// The address is of a word that the loader has filled with an address.
        pub unsafe fn put(&self, address: usize, value: usize) -> io::Result<()> {
            if !address.is_multiple_of(size_of::<usize>()) {
                return Err(io::ErrorKind::NotFound.into());
            }
            // SAFETY: a question.
            let bytes =
                usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_err(io::Error::other)?;
            let page = (address - address % bytes) as *mut c_void;
            let flags: c_int = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a page of data of this process.
            if unsafe { libc::mprotect(page, bytes, flags) } != 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: by the caller's promise; other threads see the old value or the new one.
            unsafe { AtomicUsize::from_ptr(address as *mut usize) }.store(value, Ordering::Release);
            Ok(())
        }
    }
}
