//! Single kernels on a GPU, on memory that host and GPU share: `tests/kernels` runs them as it runs them on the CPU.

use super::calls::{Address, Call};
use super::device::{Device, Pinned};
use super::modules::Modules;
use crate::error::Result;

/// A GPU with the kernels loaded.
pub struct Single {
    modules: Modules,
    device: Device,
}

impl Single {
    /// GPU `ordinal`, counted from 0.
    pub fn open(ordinal: usize) -> Result<Single> {
        let mut device = Device::open(ordinal)?;
        let modules = Modules::load(&device)?;
        device.overlaps = modules.overlap;
        Ok(Single { modules, device })
    }

    /// Memory that host and GPU see at one address, zeroed.
    pub fn memory(&self, bytes: usize) -> Result<Shared> {
        self.device.bind()?;
        self.device.pinned(bytes).map(Shared)
    }

    /// Runs one call to its end.
    pub fn run(&mut self, call: &Call) -> Result<()> {
        self.device.bind()?;
        self.device.launch(self.modules.function(call, &self.device)?, call)?;
        self.device.synchronize()
    }
}

/// Memory that host and GPU see at one address.
pub struct Shared(Pinned);

impl Shared {
    /// First byte, a multiple of 256.
    pub fn address(&self) -> Address {
        self.0.bytes().as_ptr() as Address
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}
