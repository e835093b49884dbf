//! How a function hands on who called it, on x86-64: in the register of one more argument.

/// The register of an argument, by how many are before it.
macro_rules! register {
    (1) => {
        "rsi"
    };
    (2) => {
        "rdx"
    };
    (3) => {
        "rcx"
    };
    (4) => {
        "r8"
    };
    (5) => {
        "r9"
    };
}

/// A function that calls `$to` with its own arguments and its return address as the argument behind `$n` of them. Behind six
/// all registers are taken, and it goes on the stack.
macro_rules! hand_on {
    (6, $to:path) => {
        std::arch::naked_asm!("mov rax, [rsp]", "push rax", "call {}", "add rsp, 8", "ret", sym $to)
    };
    ($n:tt, $to:path) => {
        std::arch::naked_asm!(concat!("mov ", register!($n), ", [rsp]"), "jmp {}", sym $to)
    };
}

/// A function of a pointer and a struct by value, which lies on the stack behind the return address: calls
/// `$before(pointer, struct, caller)`, and then what that returns.
macro_rules! hand_on_struct {
    ($before:path) => {
        std::arch::naked_asm!(
            "push rdi",
            "mov rdx, [rsp + 8]",
            "lea rsi, [rsp + 16]",
            "call {}",
            "pop rdi",
            "jmp rax",
            sym $before,
        )
    };
}
