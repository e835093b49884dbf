//! Which engine runs: `--device auto|cpu|cuda[:N][,cuda:N…]|cuda:all`.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use rayon::prelude::*;

use super::Engine;
use super::fused::cpu::CpuEngine;
use super::op_by_op::Multiplier;
use crate::engine::fused::Model;
use crate::engine::fused::graph::Graph;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::numerics::{Numerics, Products};

/// Where a graph is executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first GPU if there is one, else the CPU.
    #[default]
    Auto,
    /// All cores.
    Cpu,
    /// The GPUs of these numbers, at least one: layers are split over several, in this order.
    Cuda(Vec<usize>),
    /// All GPUs.
    CudaAll,
}

/// What a device is called.
const WORDS: &str = "auto, cpu, cuda, cuda:N, several as cuda:N,cuda:M, or cuda:all";

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Device, String> {
        match text.split_once(':').unwrap_or((text, "0")) {
            ("auto", "0") => Ok(Device::Auto),
            ("cpu", "0") => Ok(Device::Cpu),
            ("cuda", "all") => Ok(Device::CudaAll),
            _ => cards(text).map(Device::Cuda),
        }
    }
}

/// The numbers in `cuda:0,cuda:1`.
fn cards(text: &str) -> std::result::Result<Vec<usize>, String> {
    let mut numbers = Vec::new();
    for word in text.split(',') {
        let ("cuda", number) = word.split_once(':').unwrap_or((word, "0")) else {
            return Err(format!("`{word}` is no device; expected {WORDS}"));
        };
        let number = number.parse().map_err(|_| format!("`{number}` is no device number"))?;
        if numbers.contains(&number) {
            return Err(format!("cuda:{number} is named twice; expected each GPU once"));
        }
        numbers.push(number);
    }
    Ok(numbers)
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Auto => f.write_str("auto"),
            Device::Cpu => f.write_str("cpu"),
            Device::CudaAll => f.write_str("cuda:all"),
            Device::Cuda(numbers) => {
                for (index, number) in numbers.iter().enumerate() {
                    write!(f, "{}cuda:{number}", if index > 0 { "," } else { "" })?;
                }
                Ok(())
            }
        }
    }
}

impl Device {
    /// The numbers of its GPUs; none for the CPU, and for `auto` where there is no GPU.
    fn gpus(&self) -> Vec<usize> {
        match self {
            Device::Cpu => Vec::new(),
            Device::Auto => (0..cuda::count().min(1)).collect(),
            // Opening the first says what is missing where there is none.
            Device::CudaAll => (0..cuda::count().max(1)).collect(),
            Device::Cuda(numbers) => numbers.clone(),
        }
    }
}

/// Whether the device is there. `auto` always is.
pub fn is_present(device: &Device) -> bool {
    device.gpus().iter().all(|number| *number < cuda::count())
}

/// An engine on a device for `graph`, which may carry injected mistakes.
///
/// # Errors
/// A GPU that is not there, an arithmetic that no engine computes with.
pub fn open<'m>(
    device: &Device,
    model: &'m Model,
    graph: Graph,
    numerics: Numerics,
) -> Result<Box<dyn Engine + 'm>> {
    if numerics.eight_bits.is_some() {
        return Err(Error::new("--numerics", "no engine of parity keeps keys and values in eight bits")
            .expected("kv=f32, kv=f16 or kv=bf16")
            .found(numerics));
    }
    match device {
        Device::Auto if cuda::suits(numerics) => cuda::open(&device.gpus(), model, graph, numerics),
        Device::Auto | Device::Cpu => Ok(match numerics.products {
            Products::F64 => Box::new(CpuEngine::<f64>::new(&model.gguf, graph, numerics)),
            _ => Box::new(CpuEngine::<f32>::new(&model.gguf, graph, numerics)),
        }),
        Device::Cuda(_) | Device::CudaAll => cuda::open(&device.gpus(), model, graph, numerics),
    }
}

/// Who multiplies by the weights of a file on a device; nobody where that is the CPU.
///
/// # Errors
/// A GPU that is not there; several.
pub fn multiplier<'m>(device: &Device, gguf: &'m Gguf) -> Result<Option<Box<dyn Multiplier + 'm>>> {
    match device.gpus()[..] {
        [] => Ok(None),
        [gpu] => cuda::multiplier(gpu, gguf).map(Some),
        _ => Err(Error::new("--device", "products are one GPU's").expected("cuda:N").found(device)),
    }
}

/// Bytes that are copied to measure bandwidth: far more than caches hold.
const COPIED: usize = 256 << 20;
/// How often, of which the fastest counts.
const COPIES: usize = 5;

/// Bytes a second that a device reads and writes when it copies in its own memory. GPUs that share a model take turns:
/// theirs is the harmonic mean.
pub fn bandwidth(device: &Device) -> Result<f64> {
    let gpus = device.gpus();
    if gpus.is_empty() {
        let (from, mut to) = (vec![1u8; COPIED], vec![0u8; COPIED]);
        let seconds = (0..COPIES).map(|_| {
            let start = Instant::now();
            let pieces = to.par_chunks_mut(1 << 20).zip(from.par_chunks(1 << 20));
            pieces.for_each(|(to, from)| to.copy_from_slice(from));
            start.elapsed().as_secs_f64()
        });
        return Ok(2.0 * COPIED as f64 / seconds.fold(f64::INFINITY, f64::min));
    }
    let mut seconds_per_byte = 0.0;
    for &number in &gpus {
        seconds_per_byte += 1.0 / cuda::bandwidth(number, COPIED, COPIES)?;
    }
    Ok(gpus.len() as f64 / seconds_per_byte)
}

/// Bytes that nobody has taken in the memory of a device's GPUs, all of them together; `None` on the CPU.
pub fn free_memory(device: &Device) -> Result<Option<u64>> {
    let gpus = device.gpus();
    if gpus.is_empty() {
        return Ok(None);
    }
    let mut free = 0;
    for &number in &gpus {
        free += cuda::free_memory(number)? as u64;
    }
    Ok(Some(free))
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::engine::cuda::{self, Cards, CudaEngine, supported};
    pub use crate::engine::cuda::{bandwidth, count, free_memory};

    /// Whether there is a GPU and it computes with this arithmetic.
    pub fn suits(numerics: Numerics) -> bool {
        supported(numerics).is_ok() && count() > 0
    }

    pub fn multiplier<'m>(gpu: usize, gguf: &'m Gguf) -> Result<Box<dyn Multiplier + 'm>> {
        Ok(Box::new(cuda::Multiplier::open(gguf, gpu)?))
    }

    pub fn open<'m>(
        gpus: &[usize],
        model: &'m Model,
        graph: Graph,
        numerics: Numerics,
    ) -> Result<Box<dyn Engine + 'm>> {
        let numerics = supported(numerics)?;
        Ok(match gpus {
            [gpu] => Box::new(CudaEngine::new(&model.gguf, graph, *gpu, numerics)?),
            _ => Box::new(Cards::new(&model.gguf, graph, gpus, numerics)?),
        })
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use super::*;

    pub fn suits(_: Numerics) -> bool {
        false
    }

    pub fn count() -> usize {
        0
    }

    fn lacking() -> Error {
        Error::new("--device cuda", "this parity was built without the GPU engine")
            .expected("the cargo feature `cuda`")
            .hint("cargo install parity --features cuda, or --device cpu")
    }

    pub fn bandwidth(_: usize, _: usize, _: usize) -> Result<f64> {
        Err(lacking())
    }

    pub fn free_memory(_: usize) -> Result<usize> {
        Err(lacking())
    }

    pub fn multiplier(_: usize, _: &Gguf) -> Result<Box<dyn Multiplier>> {
        Err(lacking())
    }

    pub fn open<'m>(_: &[usize], _: &'m Model, _: Graph, _: Numerics) -> Result<Box<dyn Engine + 'm>> {
        Err(lacking())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for word in ["auto", "cpu", "cuda:0", "cuda:3", "cuda:1,cuda:0", "cuda:0,cuda:1,cuda:7", "cuda:all"] {
            assert_eq!(word.parse::<Device>().unwrap().to_string(), word);
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(vec![0])));
        assert_eq!("cuda,cuda:1".parse(), Ok(Device::Cuda(vec![0, 1])));
    }

    #[test]
    fn a_device_that_cannot_be_meant_is_refused() {
        let refused = |word: &str| word.parse::<Device>().unwrap_err();
        assert_eq!(refused("cuda:1,cuda:0,cuda:1"), "cuda:1 is named twice; expected each GPU once");
        assert_eq!(refused("cuda,cuda:0"), "cuda:0 is named twice; expected each GPU once");
        for word in ["", "gpu", "cuda:0,", ",", "cpu,cuda:0", "auto,cuda:1", "cuda:0,cpu:0"] {
            assert!(refused(word).contains(" is no device; expected auto"), "{word}: {}", refused(word));
        }
        for word in ["cuda:", "cuda:-1", "cuda:x", "cuda:0,cuda:all", "cuda:all,cuda:0", "cuda:0;cuda:1"] {
            assert!(refused(word).ends_with(" is no device number"), "{word}: {}", refused(word));
        }
    }

    #[test]
    fn no_machine_has_a_gpu_of_the_largest_number() {
        assert!(is_present(&Device::Auto) && is_present(&Device::Cpu));
        assert!(!is_present(&Device::Cuda(vec![usize::MAX])));
        assert!(!is_present(&Device::Cuda(vec![0, usize::MAX])));
    }
}
