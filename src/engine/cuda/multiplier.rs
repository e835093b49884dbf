//! Products of rows with weights of a model file, for executions op by op that compute everything else on the host.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Mutex;

use rayon::prelude::*;

use super::calls::{self, Follow, LinearData, LinearKernel, LinearPart, Pairs, TensorCores, Weight};
use super::device::{Buffer, Device, Pinned};
use super::modules::Modules;
use crate::engine::op_by_op;
use crate::error::{Error, Result};
use crate::gguf::{Gguf, TensorRef};
use crate::numerics::Storage;

/// A GPU that multiplies by the weights of a file, each of which is brought there when it is first asked for.
pub struct Multiplier<'m> {
    gguf: &'m Gguf,
    on: Mutex<On>,
}

/// What lies on the device, dropped before it.
struct On {
    /// By name.
    weights: HashMap<String, (Buffer, Weight)>,
    /// Where one lies that the file does not have, while rows are multiplied by it.
    passing: Option<Buffer>,
    /// (n, I) and (n, O), and their places on the host.
    rows: Option<(Buffer, Pinned)>,
    products: Option<(Buffer, Pinned)>,
    modules: Modules,
    /// Why the GPU computes no more.
    failed: Option<Error>,
    device: Device,
}

impl<'m> Multiplier<'m> {
    /// On GPU `ordinal`, counted from 0.
    ///
    /// # Errors
    /// No driver, a driver or GPU that is too old.
    pub fn open(gguf: &'m Gguf, ordinal: usize) -> Result<Multiplier<'m>> {
        let mut device = Device::open(ordinal)?;
        device.bind()?;
        let modules = Modules::load(&device)?;
        device.overlaps = modules.overlap;
        let on = On {
            weights: HashMap::new(),
            passing: None,
            rows: None,
            products: None,
            modules,
            failed: None,
            device,
        };
        Ok(Multiplier { gguf, on: Mutex::new(on) })
    }
}

impl op_by_op::Multiplier for Multiplier<'_> {
    fn products(&self, weight: &TensorRef<'_>, lanes: &[Cow<'_, [f32]>]) -> Option<Vec<Vec<f32>>> {
        let on = &mut *self.on.lock().ok()?;
        if on.failed.is_some() {
            return None;
        }
        let found = on.products_of(self.gguf, weight, lanes);
        found.map_err(|error| on.failed = Some(error)).ok().flatten()
    }

    fn failed(&self) -> Option<String> {
        self.on.lock().ok()?.failed.as_ref().map(|error| error.to_string().replace('\n', ","))
    }
}

/// Memory for so many values, grown where it is too small.
fn room(held: &mut Option<(Buffer, Pinned)>, what: &str, values: usize, device: &Device) -> Result<()> {
    let bytes = values * size_of::<f32>();
    if held.as_ref().is_none_or(|(buffer, _)| buffer.bytes < bytes) {
        *held = None;
        *held = Some((device.alloc(what, bytes)?, device.pinned(bytes)?));
    }
    Ok(())
}

impl On {
    fn products_of(
        &mut self,
        gguf: &Gguf,
        stored: &TensorRef<'_>,
        lanes: &[Cow<'_, [f32]>],
    ) -> Result<Option<Vec<Vec<f32>>>> {
        self.device.bind()?;
        let Some(weight) = self.weight(gguf, stored)? else { return Ok(None) };
        let values: usize = lanes.iter().map(|rows| rows.len()).sum();
        let (n, each) = (values / weight.columns, weight.outputs);
        if n == 0 || lanes.iter().any(|rows| rows.len() % weight.columns != 0) {
            return Ok(None);
        }
        room(&mut self.rows, "rows", values, &self.device)?;
        room(&mut self.products, "their products", n * each, &self.device)?;
        let (Some((x, from)), Some((out, to))) = (&mut self.rows, &mut self.products) else {
            return Ok(None);
        };
        let mut rest = from.bytes_mut();
        let mut places = Vec::with_capacity(lanes.len());
        for rows in lanes {
            let (own, behind) = rest.split_at_mut(size_of_val::<[f32]>(rows));
            places.push((own, rows));
            rest = behind;
        }
        places.into_par_iter().for_each(|(place, rows)| {
            for (bytes, value) in place.chunks_exact_mut(size_of::<f32>()).zip(rows.iter()) {
                bytes.copy_from_slice(&value.to_ne_bytes());
            }
        });
        self.device.upload(&from.bytes()[..values * size_of::<f32>()], x.address)?;
        let cores = TensorCores {
            tf32: self.device.capability.0 >= calls::TF32_SINCE,
            warpgroups: self.modules.warpgroups,
        };
        let part =
            LinearPart { weight, out: out.address, follow: Follow::Nothing, cache: 0, pairs: Pairs::Alone };
        let call = calls::linear(
            &[part],
            LinearData {
                kernel: LinearKernel::for_step(n, Storage::F32, false, cores),
                x: x.address,
                first: 0,
                rows: n,
                storage: Storage::F32,
                kv: Storage::F32,
                out_f32: false,
                norm: None,
                next: (0, 0),
                shared_max: self.device.shared_max as usize,
                constant: true,
            },
        );
        self.device.launch(self.modules.function(&call, &self.device)?, &call)?;
        let bytes = n * each * size_of::<f32>();
        self.device.start_download(out.address, &mut to.bytes_mut()[..bytes], &self.device.compute)?;
        self.device.synchronize()?;
        let mut rest = &to.bytes()[..bytes];
        let mut parts = Vec::with_capacity(lanes.len());
        for rows in lanes {
            let (own, behind) = rest.split_at(rows.len() / weight.columns * each * size_of::<f32>());
            parts.push(own);
            rest = behind;
        }
        let read = |bytes: &[u8]| -> Vec<f32> {
            let words = bytes.chunks_exact(size_of::<f32>());
            words.map(|word| f32::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
        };
        Ok(Some(parts.into_par_iter().map(read).collect()))
    }

    /// A weight on the device; `None` where no kernel reads it.
    fn weight(&mut self, gguf: &Gguf, stored: &TensorRef<'_>) -> Result<Option<Weight>> {
        let (name, dtype) = (&stored.info.name, stored.info.dtype);
        // Kernels read matrices in rows of a multiple of 8, of the types that the host decodes.
        let is_read = stored.info.shape.len() == 2 && dtype.is_decodable() && stored.cols().is_multiple_of(8);
        if !is_read {
            return Ok(None);
        }
        let is_own = gguf.tensor(name).is_some_and(|own| std::ptr::eq(own.bytes, stored.bytes));
        if let Some((_, known)) = self.weights.get(name).filter(|_| is_own) {
            return Ok(Some(*known));
        }
        let blocks = calls::on_device(stored.bytes, dtype);
        // Kernels read whole words, beyond the last bytes of a tensor.
        let bytes = blocks.len() + size_of::<u128>();
        let passing = if is_own { None } else { self.passing.take() };
        let buffer = match passing.filter(|held| held.bytes >= bytes) {
            Some(buffer) => buffer,
            None => self.device.alloc(name, bytes)?,
        };
        self.device.clear(&buffer)?;
        self.device.upload(&blocks, buffer.address)?;
        self.device.synchronize()?;
        let (outputs, columns) = (stored.rows(), stored.cols());
        let weight = Weight { address: buffer.address, dtype, outputs, columns };
        if is_own {
            self.weights.insert(name.clone(), (buffer, weight));
        } else {
            self.passing = Some(buffer);
        }
        Ok(Some(weight))
    }
}
