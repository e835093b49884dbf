//! The compiled kernels: the shipped artefact that fits the GPU, or the user's own sources.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaFunction, CudaModule};
use cudarc::nvrtc::{Ptx, result as nvrtc, sys};
use lzma_rust2::XzReader;
use sha2::{Digest, Sha256};

use super::calls::Call;
use super::device::{Device, error, failed};
use crate::error::{Error, Result};

/// The folder that `PARITY_KERNELS` names: sources that replace the shipped kernels.
const SOURCES_VARIABLE: &str = "PARITY_KERNELS";
/// Bytes of shared memory that every kernel may have without asking.
const SHARED_ALWAYS: u32 = 48 << 10;
/// The file that includes all others.
const ALL: &str = "all.cu";

macro_rules! built {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/built/", $name, ".xz"))
    };
}

/// Compute capability of Hopper.
const HOPPER: (i32, i32) = (9, 0);
/// Machine code by compute capability, compressed. Code for x.y runs on x.z with z >= y; that for Hopper, which alone has warpgroups, on
/// 9.0.
const CUBINS: [((i32, i32), &[u8]); 4] = [
    ((7, 5), built!("sm_75.cubin")),
    ((8, 0), built!("sm_80.cubin")),
    ((9, 0), built!("sm_90a.cubin")),
    ((12, 0), built!("sm_120.cubin")),
];
/// What the driver compiles for any other GPU from this capability on.
const PTX: ((i32, i32), &[u8]) = ((8, 0), built!("compute_80.ptx"));
/// Hashes of the sources that the artefacts were built from.
const MANIFEST: &str = include_str!("../../../kernels/built/manifest.json");

/// Kernels by name.
pub struct Modules {
    /// Searched in this order.
    modules: Vec<Arc<CudaModule>>,
    /// With the bytes of shared memory that each has leave to take.
    functions: HashMap<String, (CudaFunction, u32)>,
    /// Where the kernels come from, for the dump's provenance.
    pub origin: String,
    /// Whether they wait for the kernel ahead themselves: code for Hopper and later does.
    pub overlap: bool,
    /// Whether there are those in which a warpgroup multiplies: code for Hopper has them.
    pub warpgroups: bool,
}

impl Modules {
    /// Loads the kernels for a GPU; those that `PARITY_KERNELS` has edited are compiled and replace ours.
    pub fn load(device: &Device) -> Result<Modules> {
        let (mut modules, mut origin) = (Vec::new(), String::new());
        if let Some(folder) = std::env::var_os(SOURCES_VARIABLE).map(PathBuf::from) {
            for file in edited(&folder)? {
                modules.push(load(device, Ptx::from_binary(compile(&folder, &file, device.capability)?))?);
                origin += &format!("{} compiled; ", folder.join(&file).display());
            }
        }
        let (name, image) = artefact(device.capability)?;
        modules.push(load(device, image)?);
        let overlap = device.capability.0 >= 9 && name.starts_with("sm_");
        let warpgroups = name == architecture(HOPPER);
        Ok(Modules { modules, functions: HashMap::new(), origin: origin + &name, overlap, warpgroups })
    }

    /// The kernel of a call, with leave to take the shared memory that the call asks for.
    pub fn function(&mut self, call: &Call, device: &Device) -> Result<&CudaFunction> {
        let name = &call.kernel;
        if !self.functions.contains_key(name) {
            let found = self.modules.iter().find_map(|module| module.load_function(name).ok());
            let function = found.ok_or_else(|| {
                error(format!("no kernel {name}")).hint("the sources in PARITY_KERNELS may lack it")
            })?;
            self.functions.insert(name.to_owned(), (function, SHARED_ALWAYS));
        }
        let (function, leave) = self.functions.get_mut(name).expect("just put there");
        let bytes = device.shared_bytes(call);
        if bytes > *leave {
            let size = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(size, bytes as i32).map_err(failed(name))?;
            *leave = bytes;
        }
        Ok(function)
    }
}

fn load(device: &Device, image: Ptx) -> Result<Arc<CudaModule>> {
    device.context().load_module(image).map_err(failed("loading the kernels"))
}

/// The architecture that the compiler is told: with all that Hopper alone has.
fn architecture(capability: (i32, i32)) -> String {
    format!("sm_{}{}{}", capability.0, capability.1, if capability == HOPPER { "a" } else { "" })
}

/// The best of the shipped artefacts for a compute capability.
fn artefact(capability: (i32, i32)) -> Result<(String, Ptx)> {
    let fits = |built: (i32, i32)| built.0 == capability.0 && built.1 <= capability.1;
    if let Some((built, image)) = CUBINS.iter().rev().find(|(built, _)| fits(*built)) {
        return Ok((architecture(*built), Ptx::from_binary(unpacked(image)?)));
    }
    if capability >= PTX.0 {
        let source = String::from_utf8(unpacked(PTX.1)?).map_err(error)?;
        return Ok(("compute_80 PTX".into(), Ptx::from_src(source)));
    }
    Err(error("the GPU is too old for the shipped kernels")
        .expected("compute capability 7.5 (Turing) or higher")
        .found(format!("{}.{}", capability.0, capability.1))
        .hint("--device cpu runs anywhere"))
}

/// A shipped artefact as it was compiled: all of them are a tenth of the size in the program, and one is needed.
fn unpacked(image: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    XzReader::new(image, false).read_to_end(&mut bytes).map_err(error)?;
    Ok(bytes)
}

/// The `.cu` files in a folder that are not as shipped; all of them where a header is not.
fn edited(folder: &Path) -> Result<Vec<String>> {
    let manifest: serde_json::Value = serde_json::from_str(MANIFEST).map_err(error)?;
    let shipped = &manifest["sources"];
    let entries = std::fs::read_dir(folder).map_err(|e| unreadable(folder, e))?;
    let mut files = Vec::new();
    let mut header_edited = false;
    for entry in entries {
        let path = entry.map_err(|e| unreadable(folder, e))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !(name.ends_with(".cu") || name.ends_with(".cuh")) {
            continue;
        }
        let text = std::fs::read(&path).map_err(|e| unreadable(&path, e))?;
        let differs = shipped[&name] != sha256(&text);
        header_edited |= differs && name.ends_with(".cuh");
        if name.ends_with(".cu") && name != ALL {
            files.push((name, differs));
        }
    }
    if files.is_empty() {
        return Err(Error::file(folder, "holds no kernels").expected("a copy of parity's folder kernels/"));
    }
    files.sort();
    Ok(files.into_iter().filter(|(_, differs)| *differs || header_edited).map(|(name, _)| name).collect())
}

fn unreadable(path: &Path, error: std::io::Error) -> Error {
    Error::file(path, format!("cannot be read: {error}"))
        .hint(format!("{SOURCES_VARIABLE} names a folder with CUDA sources"))
}

/// Hexadecimal SHA-256.
fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compiles one file of the user's for this GPU with NVRTC.
fn compile(folder: &Path, file: &str, capability: (i32, i32)) -> Result<Vec<u8>> {
    // SAFETY: looks for a library by name.
    if !unsafe { sys::is_culib_present() } {
        return Err(error(format!("no NVRTC to compile {file} with"))
            .expected("libnvrtc.so in LD_LIBRARY_PATH")
            .hint(
                "pip install nvidia-cuda-nvrtc-cu12; it lies in nvidia/cuda_nvrtc/lib of the environment",
            ));
    }
    let path = folder.join(file);
    let text = std::fs::read(&path).map_err(|e| unreadable(&path, e))?;
    let source = CString::new(text).map_err(|_| Error::file(&path, "holds a zero byte"))?;
    let name = CString::new(file).map_err(|_| Error::file(&path, "has a zero byte in its name"))?;
    let options = [
        format!("--gpu-architecture={}", architecture(capability)),
        "--std=c++17".to_owned(),
        "--generate-line-info".to_owned(),
        format!("--include-path={}", folder.display()),
    ];
    let program = nvrtc::create_program(&source, Some(&name)).map_err(error)?;
    // SAFETY: the program was just created and is destroyed once; the buffer has the size that was asked for.
    unsafe {
        let compiled = nvrtc::compile_program(program, &options);
        let log = nvrtc::get_program_log(program).unwrap_or_default();
        let mut binary = Vec::new();
        let fetched = compiled.and_then(|()| {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &mut size).result()?;
            binary = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, binary.as_mut_ptr().cast()).result()
        });
        let _ = nvrtc::destroy_program(program);
        fetched.map(|()| binary).map_err(|failure| {
            let log: String = log.iter().take_while(|c| **c != 0).map(|c| *c as u8 as char).collect();
            Error::file(&path, "does not compile").found(format!("{failure}\n{}", log.trim_end()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_artefact_is_chosen() {
        let name = |major, minor| artefact((major, minor)).map(|(name, _)| name);
        assert_eq!(name(7, 5).unwrap(), "sm_75");
        assert_eq!(name(8, 9).unwrap(), "sm_80");
        assert_eq!(name(9, 0).unwrap(), "sm_90a");
        assert_eq!(name(10, 0).unwrap(), "compute_80 PTX");
        assert_eq!(name(12, 1).unwrap(), "sm_120");
        assert!(name(7, 0).unwrap_err().to_string().contains("too old"));
    }

    /// Rebuilding is `scripts/build-kernels.py`; that it gives these bytes is for CI, which has NVRTC.
    #[test]
    fn the_artefacts_were_built_from_these_sources() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        assert_eq!(edited(&folder).unwrap(), Vec::<String>::new(), "run scripts/build-kernels.py");
        let manifest: serde_json::Value = serde_json::from_str(MANIFEST).unwrap();
        let listed = manifest["sources"].as_object().unwrap();
        for name in listed.keys() {
            assert!(folder.join(name).is_file(), "{name} is in the manifest but is no source");
        }
        assert_eq!(manifest["artefacts"].as_object().unwrap().len(), CUBINS.len() + 1);
        for (name, artefact) in manifest["artefacts"].as_object().unwrap() {
            let bytes = std::fs::read(folder.join("built").join(format!("{name}.xz"))).unwrap();
            assert_eq!(artefact["sha256"], sha256(&unpacked(&bytes).unwrap()), "{name}");
        }
    }
}
