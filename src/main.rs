//! The process: arguments in, exit code out.

use std::process::ExitCode;

fn main() -> ExitCode {
    parity::cli::main()
}
