//! The process: arguments in, exit code out. What ends other programs in silence, or with a signal, is an error here.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;

#[cfg(not(unix))]
use parity::elsewhere::heed_signals;

/// Exit code of what could not be judged.
const COULD_NOT_JUDGE: u8 = 2;

#[global_allocator]
static MEMORY: OrSay = OrSay;

fn main() -> ExitCode {
    keep_freed_memory();
    heed_signals();
    heed_panics();
    parity::cli::main()
}

/// A panic says where it was; that it is no judgement is for the exit code to say. At once, in any thread: the program of a
/// release is built without what unwinding needs.
fn heed_panics() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        end(&[b"error: this is a bug in parity; what it was asked and the lines above are worth a report\n"]);
    }));
}

/// The system's allocator. Where it has no memory left the process says so, and ends with the exit code of what could
/// not be judged instead of a signal.
struct OrSay;

// SAFETY: every call is handed on to the system's allocator as it is.
unsafe impl GlobalAlloc for OrSay {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's layout.
        or_say(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's layout.
        or_say(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: what this allocator gave, with the layout that it was given for.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: what this allocator gave, with the layout that it was given for.
        or_say(unsafe { System.realloc(pointer, layout, size) }, size)
    }
}

/// What was allocated, if it was.
fn or_say(pointer: *mut u8, size: usize) -> *mut u8 {
    if pointer.is_null() {
        no_memory(size);
    }
    pointer
}

/// Ends the process without a further allocation.
#[cold]
fn no_memory(size: usize) -> ! {
    let mut digits = [0; 20];
    let mut rest = size;
    let mut first = digits.len();
    while first == digits.len() || rest > 0 {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let parts: [&[u8]; 3] = [
        b"error: memory: the system has none left\n  found:    ",
        &digits[first..],
        b" more bytes were asked for\n  hint:     a shorter prompt, fewer --checkpoint, or a larger machine\n",
    ];
    end(&parts)
}

/// Says something and ends the process: for places where nothing else may be called.
fn end(parts: &[&[u8]]) -> ! {
    /// Everywhere.
    const STANDARD_ERROR: libc::c_int = 2;
    for part in parts {
        // SAFETY: the bytes are alive; whether they are written decides nothing.
        unsafe { libc::write(STANDARD_ERROR, part.as_ptr().cast(), part.len() as _) };
    }
    // SAFETY: ends the process; nothing is run any more.
    unsafe { libc::_exit(COULD_NOT_JUDGE.into()) }
}

/// Every node's output is allocated and freed again: given back to the system each time, its pages would be
/// cleared anew each time.
fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: two settings of the allocator, made before there is a second thread.
    unsafe {
        // 32 MiB is the most that glibc before 2.35 takes.
        if libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30) == 0 {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        }
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// A file that reaches the largest size (`ulimit -f`) is an error of the write, and a mapped file that somebody cuts
/// short an error of the file.
#[cfg(unix)]
fn heed_signals() {
    extern "C" fn leave_it_to_the_write(_signal: libc::c_int) {}
    extern "C" fn cut_short(_signal: libc::c_int) {
        end(&[
            b"error: a file was cut short while it was read: the model, or a dump\n  hint:     wait until \
                nothing writes to it, and run this again\n",
        ]);
    }
    // Handlers and not SIG_IGN, which programs that are run from here would inherit.
    let handlers =
        [(libc::SIGXFSZ, leave_it_to_the_write as *const ()), (libc::SIGBUS, cut_short as *const ())];
    for (signal, handler) in handlers {
        // SAFETY: the first handler does nothing, the second only writes and ends the process.
        unsafe { libc::signal(signal, handler as usize) };
    }
}

#[cfg(test)]
mod tests {
    /// Set in the process that panics, which is this test once more.
    const PANICS: &str = "PARITY_TEST_PANICS";

    #[test]
    fn a_panic_of_any_thread_is_no_judgement() {
        if std::env::var_os(PANICS).is_some() {
            super::heed_panics();
            let _ = std::thread::spawn(|| panic!("of a thread")).join();
            unreachable!("the process has ended");
        }
        let program = std::env::current_exe().unwrap();
        let mut again = std::process::Command::new(program);
        again.args(["--exact", "tests::a_panic_of_any_thread_is_no_judgement", "--nocapture"]);
        let output = again.env(PANICS, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(super::COULD_NOT_JUDGE.into()), "{said}");
        assert!(said.contains("of a thread") && said.contains("error: this is a bug"), "{said}");
    }
}
