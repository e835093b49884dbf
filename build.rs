//! Embeds the tap in the program, so that `parity record` needs no second file.
//!
//! The tap is a build dependency: cargo has built its shared library before this runs. It is found where
//! cargo puts the libraries that build scripts depend on, and put, compressed, where `include_bytes!` reads it.
//! With the feature `llama-cpp` it also puts parity between the built-in llama.cpp and ggml.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use lzma_rust2::{XzOptions, XzWriter};

/// As Linux names it, and as macOS does.
const LIBRARIES: [&str; 2] = ["libparity_tap.so", "libparity_tap.dylib"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_LLAMA_CPP").is_some() {
        // Calls of this function in the built-in llama.cpp come to src/record/builtin/hook.rs.
        println!("cargo:rustc-link-arg=-Wl,--wrap=ggml_backend_sched_graph_compute_async");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // A library for another machine than the one that builds would not load there.
    let native = env::var("HOST") == env::var("TARGET");
    let found = native.then(|| library(&out)).flatten();
    let bytes = match &found {
        Some(path) => {
            println!("cargo:rerun-if-changed={}", path.display());
            let library = fs::read(path).expect("the library that was found is readable");
            let mut packed = XzWriter::new(Vec::new(), XzOptions::with_preset(6)).expect("a preset");
            packed.write_all(&library).expect("memory is written to");
            packed.finish().expect("memory is written to")
        }
        None => Vec::new(),
    };
    fs::write(out.join("libparity_tap.so.xz"), bytes).expect("OUT_DIR is writable");
}

/// The newest build of the tap in a `deps` folder above `OUT_DIR`.
fn library(out: &Path) -> Option<PathBuf> {
    let profile = env::var("PROFILE").unwrap_or_default();
    out.ancestors()
        .flat_map(|folder| [folder.join("deps"), folder.join(&profile).join("deps")])
        .flat_map(|deps| LIBRARIES.map(|library| deps.join(library)))
        .find(|library| library.is_file())
}
