//! Tables of cosines and sines for rotary position embedding, computed in f64 on the host.

use std::collections::HashMap;

use rayon::prelude::*;

use super::calls::Address;
use super::device::{Buffer, Device};
use crate::engine::fused::graph::{Anchor, Position, Rope};
use crate::error::Result;
use crate::gguf::Gguf;

/// What a table depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    base_bits: u64,
    dims: usize,
    freqs: Option<String>,
    /// Position of entry p: `shift + p·step.0/step.1`.
    shift: i64,
    step: (u32, u32),
    sign: i32,
}

impl Key {
    /// `None` for positions that no table holds. Those that are counted from their step are entries of it too: the
    /// kernel looks up what is left.
    fn new(rope: &Rope) -> Option<Key> {
        let Position { from, times: step, offset: shift } = rope.position.same()?;
        matches!(from, Anchor::Start | Anchor::Step).then_some(())?;
        Some(Key {
            base_bits: rope.base.to_bits(),
            dims: rope.dims,
            freqs: rope.freqs.clone(),
            shift,
            step,
            sign: rope.sign,
        })
    }

    /// (positions, dims/2, 2): cosine, sine.
    fn table(&self, positions: usize, gguf: &Gguf) -> Result<Vec<f32>> {
        let freqs: Vec<f64> = match &self.freqs {
            Some(freqs) => gguf.weight(freqs)?.decode(),
            None => Vec::new(),
        };
        let (base, half) = (f64::from_bits(self.base_bits), self.dims / 2);
        let rates: Vec<f64> = (0..half)
            .map(|i| base.powf(-2.0 * i as f64 / self.dims as f64) / freqs.get(i).copied().unwrap_or(1.0))
            .collect();
        let mut table = vec![0f32; positions * self.dims];
        table.par_chunks_mut(self.dims.max(1)).enumerate().for_each(|(p, row)| {
            let step = f64::from(self.step.0) / f64::from(self.step.1);
            let position = self.shift as f64 + p as f64 * step;
            for (pair, rate) in row.as_chunks_mut::<2>().0.iter_mut().zip(&rates) {
                let (sin, cos) = (position * rate).sin_cos();
                *pair = [cos as f32, (f64::from(self.sign) * sin) as f32];
            }
        });
        Ok(table)
    }
}

/// The tables in device memory.
#[derive(Default)]
pub struct Tables {
    tables: HashMap<Key, Buffer>,
    positions: usize,
}

impl Tables {
    /// Makes the table of a node, for at least `positions` positions.
    pub fn make(&mut self, device: &Device, gguf: &Gguf, rope: &Rope, positions: usize) -> Result<()> {
        if positions > self.positions {
            self.tables.clear();
            self.positions = positions;
        }
        let Some(key) = Key::new(rope) else { return Ok(()) };
        if self.tables.contains_key(&key) {
            return Ok(());
        }
        let values = key.table(self.positions, gguf)?;
        let buffer = device.alloc("the RoPE angles", 4 * values.len())?;
        device.upload(&values, buffer.address)?;
        self.tables.insert(key, buffer);
        Ok(())
    }

    /// The table of a node, if it has been made.
    pub fn get(&self, rope: &Rope) -> Option<Address> {
        self.tables.get(&Key::new(rope)?).map(|table| table.address)
    }
}
