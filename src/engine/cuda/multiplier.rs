//! Products of rows with weights of a model file, for executions op by op that compute everything else on the host.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use super::calls::{self, Follow, LinearData, LinearKernel, LinearPart, Pairs, TensorCores, Weight};
use super::device::{Buffer, Device, Pinned};
use super::modules::Modules;
use crate::engine::op_by_op;
use crate::error::{Error, Result};
use crate::gguf::{Gguf, TensorRef};
use crate::numerics::Storage;

/// A GPU that multiplies by the weights of a file, each of which is brought there when it is first asked for. Several threads
/// multiply at a time, each at a place of its own: most products are of too few rows to keep a GPU busy.
pub struct Multiplier<'m> {
    gguf: &'m Gguf,
    ordinal: usize,
    shared: Mutex<Shared>,
    /// Where nobody multiplies at the moment.
    free: Mutex<Vec<Place>>,
}

/// What all places have in common.
struct Shared {
    /// On the device, by name.
    weights: HashMap<String, (Buffer, Weight)>,
    modules: Modules,
    /// Why the GPU computes no more.
    failed: Option<Error>,
}

/// Where one thread multiplies.
struct Place {
    /// A weight that the file does not have, while rows are multiplied by it.
    passing: Option<Buffer>,
    /// (n, I) and (n, O), and their places on the host.
    rows: Option<(Buffer, Pinned)>,
    products: Option<(Buffer, Pinned)>,
    /// With streams of its own.
    device: Device,
}

impl<'m> Multiplier<'m> {
    /// On GPU `ordinal`, counted from 0.
    ///
    /// # Errors
    /// No driver, a driver or GPU that is too old.
    pub fn open(gguf: &'m Gguf, ordinal: usize) -> Result<Multiplier<'m>> {
        let device = Device::open(ordinal)?;
        device.bind()?;
        let modules = Modules::load(&device)?;
        let place = Place::new(device, &modules);
        let shared = Mutex::new(Shared { weights: HashMap::new(), modules, failed: None });
        Ok(Multiplier { gguf, ordinal, shared, free: Mutex::new(vec![place]) })
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn free(&self) -> MutexGuard<'_, Vec<Place>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place that nobody else has.
    fn place(&self) -> Result<Place> {
        if let Some(place) = self.free().pop() {
            return Ok(place);
        }
        Ok(Place::new(Device::open(self.ordinal)?, &self.shared().modules))
    }

    fn products_of(&self, stored: &TensorRef<'_>, lanes: &[Cow<'_, [f32]>]) -> Result<Option<Vec<Vec<f32>>>> {
        let mut place = self.place()?;
        place.device.bind()?;
        let found = match self.weight(&mut place, stored)? {
            Some(weight) => place.products_of(weight, lanes, self)?,
            None => None,
        };
        self.free().push(place);
        Ok(found)
    }

    /// A weight on the device; `None` where no kernel reads it.
    fn weight(&self, place: &mut Place, stored: &TensorRef<'_>) -> Result<Option<Weight>> {
        let (name, dtype) = (&stored.info.name, stored.info.dtype);
        // Kernels read matrices in rows of a multiple of 8, of the types that the host decodes.
        let is_read = stored.info.shape.len() == 2 && dtype.is_decodable() && stored.cols().is_multiple_of(8);
        if !is_read {
            return Ok(None);
        }
        let is_own = self.gguf.tensor(name).is_some_and(|own| std::ptr::eq(own.bytes, stored.bytes));
        if !is_own {
            let passing = place.passing.take();
            let (buffer, weight) = place.uploaded(stored, passing)?;
            place.passing = Some(buffer);
            return Ok(Some(weight));
        }
        // Whoever wants it meanwhile waits for it.
        let mut shared = self.shared();
        if let Some((_, known)) = shared.weights.get(name) {
            return Ok(Some(*known));
        }
        let (buffer, weight) = place.uploaded(stored, None)?;
        shared.weights.insert(name.clone(), (buffer, weight));
        Ok(Some(weight))
    }
}

impl op_by_op::Multiplier for Multiplier<'_> {
    fn products(&self, weight: &TensorRef<'_>, lanes: &[Cow<'_, [f32]>]) -> Option<Vec<Vec<f32>>> {
        if self.shared().failed.is_some() {
            return None;
        }
        let found = self.products_of(weight, lanes);
        found.map_err(|error| self.shared().failed = Some(error)).ok().flatten()
    }

    fn failed(&self) -> Option<String> {
        self.shared().failed.as_ref().map(|error| error.to_string().replace('\n', ","))
    }
}

/// Puts the rows of all lanes one behind the other.
fn put_side_by_side(lanes: &[Cow<'_, [f32]>], mut rest: &mut [u8]) {
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

impl Place {
    fn new(mut device: Device, modules: &Modules) -> Place {
        device.overlaps = modules.overlap;
        Place { passing: None, rows: None, products: None, device }
    }

    fn products_of(
        &mut self,
        weight: Weight,
        lanes: &[Cow<'_, [f32]>],
        of: &Multiplier<'_>,
    ) -> Result<Option<Vec<Vec<f32>>>> {
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
        put_side_by_side(lanes, from.bytes_mut());
        self.device.upload(&from.bytes()[..values * size_of::<f32>()], x.address)?;
        let mut shared = of.shared();
        let cores = TensorCores {
            tf32: self.device.capability.0 >= calls::TF32_SINCE,
            warpgroups: shared.modules.warpgroups,
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
        let function = shared.modules.function(&call, &self.device)?.clone();
        drop(shared);
        self.device.launch(&function, &call)?;
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

    /// Brings a weight to the device, into memory that may be there for it.
    fn uploaded(&self, stored: &TensorRef<'_>, passing: Option<Buffer>) -> Result<(Buffer, Weight)> {
        let dtype = stored.info.dtype;
        let blocks = calls::on_device(stored.bytes, dtype);
        // Kernels read whole words, beyond the last bytes of a tensor.
        let bytes = blocks.len() + size_of::<u128>();
        let buffer = match passing.filter(|held| held.bytes >= bytes) {
            Some(buffer) => buffer,
            None => self.device.alloc(&stored.info.name, bytes)?,
        };
        self.device.clear(&buffer)?;
        self.device.upload(&blocks, buffer.address)?;
        self.device.synchronize()?;
        let (outputs, columns) = (stored.rows(), stored.cols());
        let weight = Weight { address: buffer.address, dtype, outputs, columns };
        Ok((buffer, weight))
    }
}
