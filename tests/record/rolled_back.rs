//! Recurrent states that a sequence goes back to, in a real llama.cpp. SKIP where no shared libraries of one are named
//! (`PARITY_TEST_LLAMA`), or no python with numpy and gguf (`PARITY_PYTHON`).
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::path::Path;

use crate::support::driven::{LIBRARIES, driver, libraries, python};
use crate::support::program::{flat, output, parity};

const MODEL: &str = "qwen35-dense";
/// Two of three tokens are rejected, and others come in their place.
const LIFE: &str = "b0:9 b0:3 r0@10 b0:2 b0:1";
const TOKENS: [&str; 5] = ["3", "17", "91", "42", "8"];
/// The step behind the rollback.
const BEHIND: &str = "step-0002.safetensors";

fn record(dump: &Path, libraries: &Path, model: &str, flags: &[&str]) {
    let mut command = parity(&["record", "-o"]);
    command.arg(dump).args(flags).arg("--").arg(driver().unwrap()).arg(libraries).args([model, LIFE]);
    let done = command.args(TOKENS).env("DRIVER_ROLLBACK", "4").env("DRIVER_THREADS", "1").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Exit code of an audit, and what it says.
fn audit(dump: &Path, model: &str) -> (i32, String) {
    let (code, said) = output(&["audit", dump.to_str().unwrap(), "-m", model]);
    (code, flat(&said))
}

/// Writes other rows of states into what a step was given.
fn point_to(step: &Path, row: i32) -> i32 {
    let mut bytes = std::fs::read(step).unwrap();
    let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..head]).unwrap();
    let begin = head + header["leaf.rs_s_copy"]["data_offsets"][0].as_u64().unwrap() as usize;
    let place = &mut bytes[begin..begin + 4];
    let before = i32::from_le_bytes((&*place).try_into().unwrap());
    place.copy_from_slice(&row.to_le_bytes());
    std::fs::write(step, bytes).unwrap();
    before
}

#[test]
fn a_state_that_is_not_rolled_back_is_named() {
    let Some(libraries) = libraries(LIBRARIES) else { return };
    let dir = tempfile::tempdir().unwrap();
    if python(&["tests/data/archs/fill.py", dir.path().to_str().unwrap(), MODEL]).is_none() {
        return;
    }
    let model = dir.path().join(format!("{MODEL}.gguf"));
    let (model, at) = (model.to_str().unwrap(), |name: &str| dir.path().join(name));
    record(&at("healthy"), &libraries, model, &[]);
    let (code, said) = audit(&at("healthy"), model);
    assert_eq!(code, 0, "{said}");
    for node in ["blk.0.conv_output_raw", "blk.0.gated_delta_net"] {
        record(&at(node), &libraries, model, &["--inject", &format!("state.no_rollback@{node}")]);
        let (code, said) = audit(&at(node), model);
        assert_eq!(code, 1, "{said}");
        assert!(
            said.contains(&format!("DIVERGES at {node}:")) && said.contains("(state.no_rollback"),
            "{said}"
        );
    }
    // The same in every layer, and in what the program says: every node is right by itself.
    let whole = at("whole");
    record(&whole, &libraries, model, &["--inject", "state.no_rollback"]);
    assert_eq!(point_to(&whole.join(BEHIND), 0), 2);
    let (code, said) = audit(&whole, model);
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("DIVERGES at blk.0.conv_output_raw:") && said.contains("(state.no_rollback"),
        "{said}"
    );
    assert!(said.contains("from the newest state") && said.contains("of 2 tokens before"), "{said}");
}
