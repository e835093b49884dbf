//! Where the values of one step lie: what the probe wants side by side and written once, the rest in slots that
//! are used again when their last reader has run.

use std::collections::HashMap;

use crate::checkpoint::Checkpoint;
use crate::numerics::{Numerics, Storage};

/// Alignment of every value, in bytes.
pub const ALIGNMENT: usize = 256;

/// Where one checkpoint lies within the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte, from the start of the arena.
    pub offset: usize,
    /// Number of values.
    pub len: usize,
    /// What they are stored as.
    pub storage: Storage,
}

impl Place {
    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.len * bytes_of(self.storage)
    }
}

/// Bytes of one value.
pub fn bytes_of(storage: Storage) -> usize {
    if storage == Storage::F32 { 4 } else { 2 }
}

/// A value to be placed, in execution order.
#[derive(Clone, Copy, Debug)]
pub struct Value {
    /// What it is.
    pub checkpoint: Checkpoint,
    /// Number of values.
    pub len: usize,
    /// Whether the probe wants it.
    pub wanted: bool,
    /// When it is written, and when it is read last.
    pub life: (usize, usize),
}

/// The arena of one step.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Every value's place.
    pub places: HashMap<Checkpoint, Place>,
    /// Bytes in all.
    pub bytes: usize,
}

/// A place that is used again.
struct Slot {
    bytes: usize,
    offset: usize,
    free_after: usize,
}

impl Layout {
    /// Places all values. Those the probe wants come first, in execution order, each in bytes of its own.
    pub fn new(values: &[Value], numerics: &Numerics) -> Layout {
        let mut layout = Layout::default();
        for value in values.iter().filter(|value| value.wanted) {
            layout.place(value, numerics, None);
        }
        let mut slots: Vec<Slot> = Vec::new();
        for value in values.iter().filter(|value| !value.wanted) {
            let bytes = value.len * bytes_of(numerics.storage_of(value.checkpoint.kind()));
            let free = slots.iter_mut().filter(|slot| slot.free_after < value.life.0 && slot.bytes >= bytes);
            if let Some(slot) = free.min_by_key(|slot| slot.bytes) {
                slot.free_after = value.life.1.max(value.life.0);
                let offset = slot.offset;
                layout.place(value, numerics, Some(offset));
            } else {
                let offset = layout.place(value, numerics, None);
                slots.push(Slot { bytes, offset, free_after: value.life.1.max(value.life.0) });
            }
        }
        layout
    }

    fn place(&mut self, value: &Value, numerics: &Numerics, at: Option<usize>) -> usize {
        let offset = at.unwrap_or(self.bytes);
        let place = Place { offset, len: value.len, storage: numerics.storage_of(value.checkpoint.kind()) };
        if at.is_none() {
            self.bytes += place.bytes().next_multiple_of(ALIGNMENT);
        }
        self.places.insert(value.checkpoint, place);
        offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Kind;

    fn value(layer: u32, len: usize, wanted: bool, life: (usize, usize)) -> Value {
        Value { checkpoint: Checkpoint::layer(Kind::AttnOut, layer), len, wanted, life }
    }

    #[test]
    fn wanted_values_never_share_bytes_and_others_only_after_their_last_reader() {
        let values = [
            value(0, 1000, false, (0, 2)),
            value(1, 1000, true, (1, 2)),
            value(2, 900, false, (2, 3)),
            value(3, 1000, false, (3, 4)),
            value(4, 1000, true, (4, 4)),
            value(5, 500, false, (5, 5)),
        ];
        let layout = Layout::new(&values, &Numerics { storage: Storage::F16, ..Numerics::default() });
        let place = |layer| layout.places[&Checkpoint::layer(Kind::AttnOut, layer)];
        assert_eq!((place(1).offset, place(4).offset), (0, 2048), "wanted values lie side by side");
        for (i, a) in values.iter().enumerate() {
            for b in &values[i + 1..] {
                let (p, q) = (place(i as u32), layout.places[&b.checkpoint]);
                let apart = p.offset + p.bytes() <= q.offset || q.offset + q.bytes() <= p.offset;
                let one_after_other = a.life.1 < b.life.0 && !a.wanted && !b.wanted;
                assert!(apart || one_after_other, "{:?} and {:?}", a.checkpoint, b.checkpoint);
            }
        }
        assert_eq!(place(3).offset, place(0).offset, "a free slot is used again");
        assert!(values.iter().all(|v| {
            let place = layout.places[&v.checkpoint];
            place.offset + place.bytes() <= layout.bytes
        }));
    }
}
