//! Which engine runs: `--device auto|cpu|cuda[:N]`.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use rayon::prelude::*;

use super::Engine;
use super::cpu::CpuEngine;
use crate::error::Result;
use crate::model::Model;
use crate::model::graph::Graph;
use crate::numerics::{Numerics, Products};

/// Where a graph is executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first GPU if there is one, else the CPU.
    #[default]
    Auto,
    /// All cores.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Device, String> {
        match text.split_once(':').unwrap_or((text, "0")) {
            ("auto", "0") => Ok(Device::Auto),
            ("cpu", "0") => Ok(Device::Cpu),
            ("cuda", number) => {
                number.parse().map(Device::Cuda).map_err(|_| format!("`{number}` is no device number"))
            }
            _ => Err(format!("`{text}` is no device; expected auto, cpu, cuda or cuda:N")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Auto => f.write_str("auto"),
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// Whether the device is there. `auto` always is.
pub fn is_present(device: Device) -> bool {
    match device {
        Device::Auto | Device::Cpu => true,
        Device::Cuda(ordinal) => cuda::count() > ordinal,
    }
}

/// An engine on a device for `graph`, which may carry planted mistakes.
pub fn open<'m>(
    device: Device,
    model: &'m Model,
    graph: Graph,
    numerics: Numerics,
) -> Result<Box<dyn Engine + 'm>> {
    match device {
        Device::Auto if cuda::suits(numerics) => cuda::open(0, model, graph, numerics),
        Device::Auto | Device::Cpu => Ok(match numerics.products {
            Products::F64 => Box::new(CpuEngine::<f64>::new(&model.gguf, graph, numerics)),
            _ => Box::new(CpuEngine::<f32>::new(&model.gguf, graph, numerics)),
        }),
        Device::Cuda(ordinal) => cuda::open(ordinal, model, graph, numerics),
    }
}

/// Bytes that are copied to measure bandwidth: far more than caches hold.
const COPIED: usize = 256 << 20;
/// How often, of which the fastest counts.
const COPIES: usize = 5;

/// Bytes a second that a device reads and writes when it copies in its own memory.
pub fn bandwidth(device: Device) -> Result<f64> {
    match device {
        Device::Auto if cuda::count() > 0 => cuda::bandwidth(0, COPIED, COPIES),
        Device::Cuda(ordinal) => cuda::bandwidth(ordinal, COPIED, COPIES),
        Device::Auto | Device::Cpu => {
            let (from, mut to) = (vec![1u8; COPIED], vec![0u8; COPIED]);
            let seconds = (0..COPIES).map(|_| {
                let start = Instant::now();
                let pieces = to.par_chunks_mut(1 << 20).zip(from.par_chunks(1 << 20));
                pieces.for_each(|(to, from)| to.copy_from_slice(from));
                start.elapsed().as_secs_f64()
            });
            Ok(2.0 * COPIED as f64 / seconds.fold(f64::INFINITY, f64::min))
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::engine::cuda::{CudaEngine, supported};
    pub use crate::engine::cuda::{bandwidth, count};

    /// Whether there is a GPU and it computes with this arithmetic.
    pub fn suits(numerics: Numerics) -> bool {
        supported(numerics).is_ok() && count() > 0
    }

    pub fn open<'m>(
        ordinal: usize,
        model: &'m Model,
        graph: Graph,
        numerics: Numerics,
    ) -> Result<Box<dyn Engine + 'm>> {
        Ok(Box::new(CudaEngine::new(&model.gguf, graph, ordinal, supported(numerics)?)?))
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use super::*;
    use crate::error::Error;

    pub fn suits(_: Numerics) -> bool {
        false
    }

    pub fn count() -> usize {
        0
    }

    pub fn bandwidth(_: usize, _: usize, _: usize) -> Result<f64> {
        Err(Error::new("--device cuda", "this parity was built without the GPU engine"))
    }

    pub fn open<'m>(_: usize, _: &'m Model, _: Graph, _: Numerics) -> Result<Box<dyn Engine + 'm>> {
        Err(Error::new("--device cuda", "this parity was built without the GPU engine")
            .expected("the cargo feature `cuda`")
            .hint("cargo install parity --features cuda, or --device cpu"))
    }
}
