//! The program and the libraries of this process, and words in them that the loader has filled.

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::Mmap;

/// The program, or a library.
pub struct Image {
    /// The file that it was loaded from.
    pub path: PathBuf,
    /// What is added to its addresses.
    bias: usize,
    /// Its program headers, as they are in memory.
    headers: Vec<u8>,
}

/// Where the headers of an ELF file lie is written there.
const HEADERS_AT: usize = 32;

/// All that is loaded, in the order in which it was.
pub fn all() -> Vec<Image> {
    let mut images: Vec<Image> = Vec::new();
    // SAFETY: the callback gets back the vector that is passed in.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut images).cast()) };
    images
}

unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _size: usize, images: *mut c_void) -> c_int {
    // SAFETY: `all` passes a vector; name and headers live while the library does.
    unsafe {
        let name = match (*info).dlpi_name {
            name if name.is_null() => c"",
            name => CStr::from_ptr(name),
        };
        let path = match name.to_bytes() {
            b"" => PathBuf::from("/proc/self/exe"),
            bytes => PathBuf::from(OsStr::from_bytes(bytes)),
        };
        let bytes = usize::from((*info).dlpi_phnum) * size_of::<libc::Elf64_Phdr>();
        let headers = std::slice::from_raw_parts((*info).dlpi_phdr.cast::<u8>(), bytes).to_vec();
        let bias = (*info).dlpi_addr as usize;
        // What the kernel brings along has a name without a folder, and no file.
        if path.components().count() > 1 {
            (*images.cast::<Vec<Image>>()).push(Image { path, bias, headers });
        }
    }
    0
}

impl Image {
    /// Where a word lies that is so far from the start of the image.
    pub fn address(&self, offset: u64) -> usize {
        self.bias.wrapping_add(offset as usize)
    }

    /// The file, if it still is what was loaded.
    pub fn file(&self) -> Result<Mmap, String> {
        let file = File::open(&self.path).map_err(|e| e.to_string())?;
        // SAFETY: a library that is loaded is mapped in any case, and would break in the same way if it were changed.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| e.to_string())?;
        let at = map.get(HEADERS_AT..HEADERS_AT + 8).and_then(|bytes| bytes.try_into().ok());
        let start = at.map(u64::from_le_bytes).and_then(|at| usize::try_from(at).ok());
        let same = start.and_then(|at| map.get(at..)).is_some_and(|rest| rest.starts_with(&self.headers));
        if same { Ok(map) } else { Err("the file is another by now".to_owned()) }
    }
}

/// Which parts of memory may be written to.
pub struct Regions(Vec<(std::ops::Range<usize>, bool)>);

impl Regions {
    /// As they are now.
    pub fn read() -> io::Result<Regions> {
        Ok(Regions::parse(&fs::read_to_string("/proc/self/maps")?))
    }

    /// Reads lines such as `7f00-7f80 rw-p …`. What is shared with other processes is left out.
    fn parse(text: &str) -> Regions {
        let region = |line: &str| {
            let (range, rest) = line.split_once(' ')?;
            let (from, to) = range.split_once('-')?;
            let number = |text: &str| usize::from_str_radix(text, 16).ok();
            let private = rest.as_bytes().get(3) == Some(&b'p');
            private.then_some((number(from)?..number(to)?, rest.as_bytes()[1] == b'w'))
        };
        Regions(text.lines().filter_map(region).collect())
    }

    /// Puts a value into a word. Its page, if the loader has made it read-only, is so afterwards too.
    ///
    /// # Safety
    /// The address is of a word that the loader has filled with an address.
    pub unsafe fn put(&self, address: usize, value: usize) -> io::Result<()> {
        let region = self.0.iter().find(|(range, _)| range.contains(&address));
        let (_, writable) =
            region.filter(|_| address.is_multiple_of(size_of::<usize>())).ok_or(io::ErrorKind::NotFound)?;
        // SAFETY: a question.
        let bytes =
            usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_err(io::Error::other)?;
        let page = (address - address % bytes) as *mut c_void;
        let protect = |flags: c_int| {
            // SAFETY: a page of this process; reading stays allowed throughout.
            match *writable || unsafe { libc::mprotect(page, bytes, flags) } == 0 {
                true => Ok(()),
                false => Err(io::Error::last_os_error()),
            }
        };
        protect(libc::PROT_READ | libc::PROT_WRITE)?;
        // SAFETY: by the caller's promise; other threads see the old value or the new one.
        unsafe { AtomicUsize::from_ptr(address as *mut usize) }.store(value, Ordering::Release);
        protect(libc::PROT_READ)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_those_of_this_process_alone() {
        let text =
            "1000-2000 r--p 0 00:00 1 /lib/a.so\n2000-3000 rw-p 0 00:00 1\n3000-4000 rw-s 0 00:00 2\nodd\n";
        assert_eq!(Regions::parse(text).0, [(0x1000..0x2000, false), (0x2000..0x3000, true)]);
    }

    #[test]
    fn a_word_on_a_page_that_is_read_only_is_changed_and_the_page_stays_so() {
        // SAFETY: a page of our own.
        let page = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, flags, -1, 0) as usize
        };
        let writable =
            || Regions::read().unwrap().0.into_iter().find(|(range, _)| range.contains(&page)).unwrap().1;
        assert!(!writable());
        let regions = Regions::read().unwrap();
        // SAFETY: words of that page.
        unsafe {
            regions.put(page + 16, 77).unwrap();
            assert_eq!((page as *const usize).add(2).read(), 77);
            assert!(regions.put(page + 1, 1).is_err() && regions.put(8, 1).is_err());
        }
        assert!(!writable());
    }

    #[test]
    fn the_files_of_this_process_are_those_that_were_loaded() {
        let images = all();
        let libc = images.iter().find(|image| image.path.to_string_lossy().contains("libc.so")).unwrap();
        assert!(libc.file().is_ok());
        let other = Image { path: libc.path.clone(), bias: 0, headers: vec![1; 56] };
        assert!(other.file().is_err());
    }
}
