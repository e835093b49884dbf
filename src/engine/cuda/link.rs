//! What one GPU hands to another: a copy from memory to memory, ordered by the streams alone.

use cudarc::driver::{result, sys};

use super::calls::Address;
use super::device::{Device, error, failed};
use super::event::Event;
use crate::error::Result;

/// Bytes that are handed over and compared once before a link is used.
const TRIED: usize = 64 << 10;

/// The way from one GPU to another, or within one.
pub struct Link {
    arrived: Event,
}

impl Link {
    /// A link whose bytes arrive, directly where the GPUs reach each other's memory, else through the host.
    ///
    /// # Errors
    /// The driver's, and bytes that arrive changed, which happens where the host's settings break direct copies.
    pub fn open(from: &Device, to: &Device) -> Result<Link> {
        if !from.shares_memory(to) {
            from.reach(to)?;
            to.reach(from)?;
        }
        from.bind()?;
        let link = Link { arrived: Event::new(from)? };
        link.check(from, to)?;
        Ok(link)
    }

    /// Copies once `from` has computed what it has been told to; `to` goes on when it has arrived.
    pub fn hand_over(
        &self,
        (from, source): (&Device, Address),
        (to, target): (&Device, Address),
        bytes: usize,
    ) -> Result<()> {
        from.bind()?;
        if from.shares_memory(to) {
            from.copy_within(source, target, bytes)?;
        } else {
            let [source_context, target_context] = [from, to].map(|device| device.context().cu_ctx());
            let stream = from.compute.cu_stream();
            // SAFETY: callers give two addresses with that much behind them, each on its GPU.
            unsafe {
                result::memcpy_peer_async(target_context, target, source_context, source, bytes, stream)
            }
            .map_err(failed("a copy to another GPU"))?;
        }
        self.arrived.record(&from.compute)?;
        to.bind()?;
        self.arrived.hold(&to.compute)
    }

    /// Hands bytes over and compares them.
    fn check(&self, from: &Device, to: &Device) -> Result<()> {
        let sent: Vec<u32> = (0..(TRIED / 4) as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
        from.bind()?;
        let source = from.alloc("a copy", TRIED)?;
        from.upload(&sent, source.address)?;
        to.bind()?;
        let target = to.alloc("a copy", TRIED)?;
        to.clear(&target)?;
        to.synchronize()?;
        self.hand_over((from, source.address), (to, target.address), TRIED)?;
        if to.download::<u32>(target.address, sent.len())? == sent {
            return Ok(());
        }
        Err(error("what one GPU hands to another does not arrive whole")
            .expected(format!("{TRIED} bytes of {} on {}", from.name, to.name))
            .hint(
                "one GPU alone (--device cuda:N); copies between GPUs may need the host's IOMMU switched off",
            ))
    }
}

impl Device {
    /// Whether the other one is the same GPU.
    fn shares_memory(&self, other: &Device) -> bool {
        self.context().cu_ctx() == other.context().cu_ctx()
    }

    /// Lets this GPU reach the memory of another directly, where the machine can.
    fn reach(&self, other: &Device) -> Result<()> {
        let [own, others] = [self, other].map(|device| device.context().cu_device());
        let mut can = 0;
        // SAFETY: writes one integer.
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, own, others) }
            .result()
            .map_err(failed("asking for peer access"))?;
        if can == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the context is alive as long as its device.
        let enabled = unsafe { sys::cuCtxEnablePeerAccess(other.context().cu_ctx(), 0) };
        // There is a limit on how many GPUs reach one another; beyond it copies go through the host.
        match enabled {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
            | sys::CUresult::CUDA_ERROR_TOO_MANY_PEERS => Ok(()),
            enabled => enabled.result().map_err(failed("peer access")),
        }
    }
}
