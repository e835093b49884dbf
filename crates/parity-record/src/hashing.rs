//! Hashes and norms of values as they come, in the place of the values.

use half::{bf16, f16};
use parity_dump::hashes::{Hashed, HashedRow};
use parity_dump::{Checkpoint, Element};
use twox_hash::XxHash3_128;

/// The tensors of one step.
#[derive(Default)]
pub struct StepHashes {
    done: Vec<Hashed>,
    open: Option<Open>,
}

/// The tensor whose bytes are coming.
struct Open {
    hashed: Hashed,
    element: Element,
    /// Positions of its rows, where they are rows of tokens.
    positions: Vec<u32>,
    row: Vec<u8>,
    row_bytes: usize,
}

impl StepHashes {
    /// A tensor whose bytes follow; `positions` are those of its rows.
    pub fn begin(&mut self, id: Checkpoint, element: Element, shape: &[usize], positions: &[u32]) {
        self.close();
        let rows = shape.first().copied().unwrap_or(1).max(1);
        let row_bytes = shape.iter().product::<usize>() / rows * element.size();
        let hashed = Hashed { id, shape: shape.to_vec(), dtype: element.name().to_owned(), rows: Vec::new() };
        let positions = if positions.len() == rows { positions.to_vec() } else { Vec::new() };
        let row = Vec::with_capacity(row_bytes);
        self.open = Some(Open { hashed, element, positions, row, row_bytes });
    }

    /// What follows is no tensor of values.
    pub fn close(&mut self) {
        self.done.extend(self.open.take().map(|open| open.hashed));
    }

    /// Takes the next bytes of the tensor that was begun last.
    pub fn append(&mut self, mut bytes: &[u8]) {
        let Some(open) = &mut self.open else { return };
        while !bytes.is_empty() && open.row_bytes > 0 {
            let wanted = open.row_bytes - open.row.len();
            let (now, rest) = bytes.split_at(wanted.min(bytes.len()));
            bytes = rest;
            // A whole row is not copied.
            if open.row.is_empty() && now.len() == open.row_bytes {
                open.finish(now);
                continue;
            }
            open.row.extend_from_slice(now);
            if open.row.len() == open.row_bytes {
                let row = std::mem::take(&mut open.row);
                open.finish(&row);
                open.row = row;
                open.row.clear();
            }
        }
    }

    /// The lines of the step, and none are left.
    pub fn lines(&mut self) -> Result<String, String> {
        self.close();
        let lines = std::mem::take(&mut self.done);
        let line = |hashed: &Hashed| serde_json::to_string(hashed).map_err(|e| e.to_string());
        Ok(lines.iter().map(line).collect::<Result<Vec<_>, _>>()?.join("\n") + "\n")
    }
}

impl Open {
    fn finish(&mut self, row: &[u8]) {
        let (mut squares, mut nonfinite) = (0.0, 0);
        let mut add = |value: f32| {
            squares += f64::from(value) * f64::from(value);
            nonfinite += u64::from(!value.is_finite());
        };
        match self.element {
            Element::F32 => {
                row.chunks_exact(4).for_each(|b| add(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
            Element::F16 => {
                row.chunks_exact(2).for_each(|b| add(f16::from_le_bytes([b[0], b[1]]).to_f32()));
            }
            Element::Bf16 => {
                row.chunks_exact(2).for_each(|b| add(bf16::from_le_bytes([b[0], b[1]]).to_f32()));
            }
        }
        let norm = Some(squares.sqrt()).filter(|norm: &f64| norm.is_finite());
        let position = self.positions.get(self.hashed.rows.len()).copied();
        let hash = format!("{:032x}", XxHash3_128::oneshot(row));
        self.hashed.rows.push(HashedRow { position, hash, norm, nonfinite });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_hashed_whatever_pieces_they_come_in() {
        let bytes: Vec<u8> =
            [3f32, 4.0, 0.0, -0.0, f32::NAN, 1.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let lines = |pieces: usize| {
            let mut hashes = StepHashes::default();
            hashes.begin("logits".parse().unwrap(), Element::F32, &[3, 2], &[7, 8, 9]);
            bytes.chunks(pieces).for_each(|piece| hashes.append(piece));
            hashes.lines().unwrap()
        };
        let whole = lines(24);
        assert!(whole == lines(3) && whole == lines(8) && whole == lines(5));
        let read: Hashed = serde_json::from_str(whole.trim_end()).unwrap();
        assert_eq!(read.rows.iter().map(|row| row.position).collect::<Vec<_>>(), [Some(7), Some(8), Some(9)]);
        assert_eq!(read.rows.iter().map(|row| row.norm).collect::<Vec<_>>(), [Some(5.0), Some(0.0), None]);
        assert_eq!(read.rows.iter().map(|row| row.nonfinite).collect::<Vec<_>>(), [0, 0, 1]);
        // The value of the specification for no input tells that it is this hash.
        assert_eq!(format!("{:032x}", XxHash3_128::oneshot(b"")), "99aa06d3014798d86001c324468d497f");
    }
}
