//! What systems other than Unix do in its place: built by CI for Windows, where nothing is recorded by preload.

use std::ffi::{CStr, c_void};

/// Where libraries are not loaded as Unix does, nothing is gathered.
pub fn loaded(_name: &CStr) -> Option<*mut c_void> {
    None
}

/// As above.
pub fn symbol(_library: *mut c_void, _name: &CStr) -> Option<*mut c_void> {
    None
}

/// Where there are no signals, there are none to block.
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    start()
}
