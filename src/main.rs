//! The process: arguments in, exit code out.

use std::process::ExitCode;

fn main() -> ExitCode {
    keep_freed_memory();
    parity::cli::main()
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
