//! Prints where the imports of a file lie, a line for each: `imports FILE x86_64|aarch64`.

use parity_imports::{Machine, imports};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(file), Some(machine)) = (words.next(), words.next()) else {
        return Err("FILE x86_64|aarch64".into());
    };
    let machine = if machine == "aarch64" { Machine::Aarch64 } else { Machine::X86_64 };
    for slot in imports(&std::fs::read(file)?, machine)?.slots {
        println!("{:016x} {}", slot.offset, slot.name);
    }
    Ok(())
}
