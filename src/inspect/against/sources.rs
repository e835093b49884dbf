//! Where the values of a tensor may come from: parts of stored tensors, in every arrangement that fits.

use super::folder::{Folder, Stored};
use super::names::{Part, Place, Wanted};
use super::view::{Order, View};
use crate::gguf::Gguf;
use parity_graph::weights;

/// How values lie in a file, against how they were stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct How {
    /// Rows for columns.
    pub transposed: bool,
    /// Whether the rows of every head lie in another order.
    pub order: Order,
    /// 1 where the file holds 1 + w, -1 where it holds w - 1.
    pub add: i8,
}

impl How {
    /// What an architecture's files hold.
    pub fn is(self, wanted: Wanted) -> bool {
        match wanted {
            Wanted::AsStored => self.order == Order::AsStored && self.add == 0,
            Wanted::Pairs => matches!(self.order, Order::Pairs(_)) && self.add == 0,
            Wanted::PlusOne => self.order == Order::AsStored && self.add == 1,
        }
    }

    /// In words; empty where nothing is rearranged.
    pub fn text(self) -> String {
        let mut words = Vec::new();
        words.extend(self.transposed.then_some("transposed"));
        words.extend(match self.order {
            Order::AsStored => None,
            Order::Pairs(_) => Some("rows of every head: halves to pairs"),
            Order::Halves(_) => Some("rows of every head: pairs to halves"),
        });
        words.extend(match self.add {
            1 => Some("1 + w"),
            -1 => Some("w - 1"),
            _ => None,
        });
        words.join(", ")
    }
}

/// A part of a stored tensor that has the shape of one of a file.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// Its name in the folder.
    pub name: &'a str,
    /// Which part of it.
    pub part: Part,
    /// Which expert of it.
    pub expert: Option<usize>,
    /// How it would lie in the file.
    pub how: How,
    /// Its values.
    pub view: View<'a>,
}

/// What is asked of a source: a matrix of a file, or one expert's of several.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    /// `attn_q`
    pub role: &'a str,
    /// Rows and columns; a vector is one row.
    pub shape: [usize; 2],
    /// Which expert, of how many.
    pub expert: Option<(usize, usize)>,
}

/// Widths of heads.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub width: usize,
    /// Rows of queries, keys and values.
    rows: [usize; 3],
}

impl Heads {
    /// As the metadata say; `None` where they do not, or where layers differ.
    pub fn of(gguf: &Gguf, architecture: &str) -> Option<Heads> {
        let number =
            |key: &str| gguf.u32(&format!("{architecture}.{key}")).ok().flatten().map(|n| n as usize);
        let heads = number("attention.head_count").filter(|heads| *heads > 0)?;
        let kv = number("attention.head_count_kv").unwrap_or(heads);
        let width = number("attention.key_length").or(Some(number("embedding_length")? / heads))?;
        let values = number("attention.value_length").unwrap_or(width);
        let rows = [heads.checked_mul(width)?, kv.checked_mul(width)?, kv.checked_mul(values)?];
        (width > 0).then_some(Heads { width, rows })
    }
}

/// The arrangements in which a part of a stored tensor has the shape of a slice. Those that are wanted come first.
pub fn sources<'a>(
    folder: &'a Folder,
    (name, stored): (&'a str, &'a Stored),
    part: Part,
    slice: &Slice<'_>,
    heads: Option<Heads>,
) -> Vec<Source<'a>> {
    let Some(element) = stored.element else { return Vec::new() };
    let bytes = folder.bytes(stored);
    let mut axes: Vec<usize> = stored.shape.clone();
    let own = Place::of(name).expert;
    let (mut start, mut expert) = (0, own);
    if let Some((number, all)) = slice.expert
        && own.is_none()
    {
        if axes.first() != Some(&all) || axes.len() < 2 {
            return Vec::new();
        }
        axes.remove(0);
        start = number * axes.iter().product::<usize>();
        expert = Some(number);
    }
    axes.retain(|axis| *axis != 1);
    let mut found = Vec::new();
    for (transposed, lies) in arrangements(&axes) {
        let Some((first, step, rows)) = part.rows(lies.rows, heads) else { continue };
        let vector = axes.len() < 2;
        let shape = if vector { [1, rows] } else { [rows, lies.cols] };
        if shape != slice.shape {
            continue;
        }
        let (row, col) = if vector { (rows, lies.row * step) } else { (lies.row * step, lies.col) };
        let start = start + first * lies.row;
        let view = View { bytes, element, start, shape, row, col, order: Order::AsStored, add: 0.0 };
        if !view.fits() {
            continue;
        }
        for how in variants(slice, transposed, heads) {
            let view = View { order: how.order, add: f32::from(how.add), ..view };
            found.push(Source { name, part, expert, how, view });
        }
    }
    found
}

/// Rows and columns, and how many values lie between two of them.
struct Lies {
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

/// As it is stored, and transposed; leading axes count as rows.
fn arrangements(axes: &[usize]) -> Vec<(bool, Lies)> {
    match axes {
        [] => vec![(false, Lies { rows: 1, cols: 1, row: 1, col: 1 })],
        [n] => vec![(false, Lies { rows: *n, cols: 1, row: 1, col: 1 })],
        [slower @ .., cols] => {
            let rows = slower.iter().product();
            vec![
                (false, Lies { rows, cols: *cols, row: *cols, col: 1 }),
                (true, Lies { rows: *cols, cols: rows, row: 1, col: *cols }),
            ]
        }
    }
}

impl Part {
    /// First row, distance of rows, and how many there are, of `all`.
    fn rows(self, all: usize, heads: Option<Heads>) -> Option<(usize, usize, usize)> {
        match self {
            Part::Whole => Some((0, 1, all)),
            Part::Half(half) => all.is_multiple_of(2).then_some((half * (all / 2), 1, all / 2)),
            Part::Alternate(first) => all.is_multiple_of(2).then_some((first, 2, all / 2)),
            Part::Qkv(which) => {
                let rows = heads?.rows;
                let sum = rows.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows))?;
                (sum == all).then_some((rows[..which].iter().sum(), 1, rows[which]))
            }
        }
    }

    /// In words; empty for the whole.
    pub fn text(self) -> String {
        match self {
            Part::Whole => String::new(),
            Part::Half(half) => format!("{} half of", ["first", "second"][half]),
            Part::Alternate(first) => format!("every second row from {first} on of"),
            Part::Qkv(which) => format!("rows of {} of", ["queries", "keys", "values"][which]),
        }
    }
}

/// Orders of rows of queries and keys, and offsets of norms.
fn variants(slice: &Slice<'_>, transposed: bool, heads: Option<Heads>) -> Vec<How> {
    let plain = How { transposed, order: Order::AsStored, add: 0 };
    let vector = slice.shape[0] == 1;
    let rows = if vector { slice.shape[1] } else { slice.shape[0] };
    let width = heads.map(|heads| heads.width).filter(|width| width % 2 == 0 && rows % width == 0);
    let mut out = vec![plain];
    if matches!(slice.role, weights::ATTN_Q | weights::ATTN_K)
        && let Some(width) = width
    {
        out.extend([Order::Pairs(width), Order::Halves(width)].map(|order| How { order, ..plain }));
    }
    if vector && slice.role.ends_with("norm") {
        out.extend([1, -1].map(|add| How { add, ..plain }));
    }
    out
}
