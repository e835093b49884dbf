//! The real functions behind those that this library stands in for.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Mutex;

/// Real functions found so far, by name and return address of the caller.
static FOUND: Mutex<Option<HashMap<(&'static CStr, usize), usize>>> = Mutex::new(None);

/// The real `name` for code at address `caller`; null where there is none.
///
/// The library of the caller and those that it depends on come first, then everything that was loaded
/// behind this library, then any loaded library that has it.
pub fn real(name: &'static CStr, caller: *const c_void) -> *mut c_void {
    let key = (name, caller as usize);
    let mut found = FOUND.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let found = found.get_or_insert_with(HashMap::new);
    if let Some(&symbol) = found.get(&key) {
        return symbol as *mut c_void;
    }
    let symbol = find(name, caller);
    found.insert(key, symbol as usize);
    symbol
}

/// The symbol `name` of the library that the function at address `member` comes from.
pub fn beside(member: *const c_void, name: &CStr) -> *mut c_void {
    object_of(member).map_or(std::ptr::null_mut(), |path| in_object(&path, name))
}

/// Path of the library that holds an address.
pub fn object_of(address: *const c_void) -> Option<CString> {
    // SAFETY: `info` is written by dladdr before it is read, and its strings live with the library.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(address, &mut info) != 0 && !info.dli_fname.is_null())
            .then(|| CStr::from_ptr(info.dli_fname).to_owned())
    }
}

fn find(name: &'static CStr, caller: *const c_void) -> *mut c_void {
    let near = object_of(caller).map_or(std::ptr::null_mut(), |path| in_object(&path, name));
    if is_foreign(near) {
        return near;
    }
    // SAFETY: a lookup.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if is_foreign(next) {
        return next;
    }
    any(name)
}

/// A symbol of any loaded library but this one.
pub fn any(name: &CStr) -> *mut c_void {
    let mut paths: Vec<CString> = Vec::new();
    // SAFETY: the callback gets back the vector that is passed in.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut paths).cast()) };
    let mut symbols = paths.iter().map(|path| in_object(path, name));
    symbols.find(|&symbol| is_foreign(symbol)).unwrap_or(std::ptr::null_mut())
}

unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _size: usize, paths: *mut c_void) -> c_int {
    // SAFETY: `any` passes a vector; the name is a C string that lives while the library does.
    unsafe {
        let name: *const c_char = (*info).dlpi_name;
        if !name.is_null() && *name != 0 {
            (*paths.cast::<Vec<CString>>()).push(CStr::from_ptr(name).to_owned());
        }
    }
    0
}

/// A symbol of a library that is already loaded, or of one that it depends on.
fn in_object(path: &CStr, name: &CStr) -> *mut c_void {
    // SAFETY: lookups; the handle is given back, and the library stays loaded as it was before.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if handle.is_null() {
            return std::ptr::null_mut();
        }
        let symbol = libc::dlsym(handle, name.as_ptr());
        libc::dlclose(handle);
        symbol
    }
}

/// Whether a symbol was found, and is not one of this library's own.
fn is_foreign(symbol: *mut c_void) -> bool {
    !symbol.is_null() && object_of(symbol) != object_of(is_foreign as *const c_void)
}
