//! A matrix within a stored tensor, read in another arrangement than it lies in.

use parity_dump::Element;

/// In which order the rows of every head are read; of a vector, its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they lie.
    AsStored,
    /// Head rows (2, E/2) as (E/2, 2): pairs side by side, as the conversion of the Llama family lays them.
    Pairs(usize),
    /// Head rows (E/2, 2) as (2, E/2): the reverse.
    Halves(usize),
}

impl Order {
    /// The stored row that is read as `row`.
    fn from(self, row: usize) -> usize {
        let within = |width: usize| (row / width * width, row % width, width / 2);
        match self {
            Order::AsStored => row,
            Order::Pairs(width) => {
                let (head, within, half) = within(width);
                head + within % 2 * half + within / 2
            }
            Order::Halves(width) => {
                let (head, within, half) = within(width);
                head + within % half * 2 + within / half
            }
        }
    }
}

/// Rows of a stored tensor: value (r, c) lies at start + r·row + c·col.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The tensor from its first value on.
    pub bytes: &'a [u8],
    /// The type of its values.
    pub element: Element,
    /// Index of value (0, 0).
    pub start: usize,
    /// Rows and columns; a vector is one row.
    pub shape: [usize; 2],
    /// Values from one row to the next.
    pub row: usize,
    /// Values from one column to the next.
    pub col: usize,
    /// Order of the rows.
    pub order: Order,
    /// Added to every value.
    pub add: f32,
}

impl View<'_> {
    /// Whether the last value that is read lies within the tensor.
    pub fn fits(&self) -> bool {
        let [rows, cols] = self.shape;
        let last = |n: usize, step: usize| n.checked_sub(1).and_then(|n| n.checked_mul(step));
        let end = last(rows, self.row).zip(last(cols, self.col)).and_then(|(r, c)| r.checked_add(c));
        let end = end.and_then(|end| end.checked_add(self.start));
        end.is_some_and(|end| end < self.bytes.len() / self.element.size())
    }

    /// Decodes a row into `out`, (cols,).
    pub fn read(&self, row: usize, out: &mut [f32]) {
        let [rows, cols] = self.shape;
        let size = self.element.size();
        let vector = rows == 1 && self.order != Order::AsStored;
        let from = if vector { row } else { self.order.from(row) };
        let start = self.start + from * self.row;
        if self.col == 1 && !vector {
            self.element.decode(&self.bytes[start * size..(start + cols) * size], out);
        } else {
            for (c, out) in out.iter_mut().enumerate() {
                let c = if vector { self.order.from(c) } else { c };
                let at = (start + c * self.col) * size;
                self.element.decode(&self.bytes[at..at + size], std::slice::from_mut(out));
            }
        }
        if self.add != 0.0 {
            out.iter_mut().for_each(|value| *value += self.add);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_undo_one_another_and_strides_turn_a_matrix() {
        let values: Vec<u8> = (0..24u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
        let plain = View {
            bytes: &values,
            element: Element::F32,
            start: 0,
            shape: [12, 2],
            row: 2,
            col: 1,
            order: Order::AsStored,
            add: 0.0,
        };
        let rows = |view: View<'_>| -> Vec<f32> {
            let mut row = vec![0.0; view.shape[1]];
            (0..view.shape[0])
                .flat_map(|r| {
                    view.read(r, &mut row);
                    row.clone()
                })
                .collect()
        };
        // Two heads of six rows: 0 and 3 become neighbours.
        let pairs = rows(View { order: Order::Pairs(6), ..plain });
        assert_eq!(pairs[..8], [0.0, 1.0, 6.0, 7.0, 2.0, 3.0, 8.0, 9.0]);
        let bytes: Vec<u8> = pairs.iter().flat_map(|x| x.to_le_bytes()).collect();
        let back = View { bytes: &bytes, order: Order::Halves(6), ..plain };
        assert_eq!(rows(back), rows(plain));
        let turned = View { shape: [2, 12], row: 1, col: 2, add: 1.0, ..plain };
        assert_eq!(rows(turned)[..3], [1.0, 3.0, 5.0]);
        let vector = View { shape: [1, 6], order: Order::Pairs(6), ..plain };
        assert_eq!(rows(vector), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert!(plain.fits() && !View { start: 1, ..plain }.fits());
    }
}
