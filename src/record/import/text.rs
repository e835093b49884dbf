//! Reads the text that `llama-eval-callback` and `llama-debug` print of each node: name, type, op, sources,
//! extents, the first and last values of each axis and their sum.
//!
//! ```text
//! common_debug_cb_eval:  Qcur-0 = (f32)  MUL_MAT(blk.0.attn_q.weight{128, 128, 1, 1}, attn_norm-0{128, 5, 1, 1}}) = {128, 5, 1, 1}
//!     [
//!         [
//!             [      0.2140,      -0.1113,       0.0541,    ...,       0.0061,      -0.6219,       0.1140  ],
//!             ...
//!         ],
//!     ]
//!     sum = 12.345678
//! ```
//!
//! Up to January 2026 a node began with `ggml_debug:`. Lines of other origin may stand between: programs
//! print their log on the same terminal.

/// What begins the first line of a node, in the releases known.
const MARKS: [&str; 2] = ["ggml_debug:", "common_debug_cb_eval:"];
/// Extents of every tensor.
const DIMS: usize = 4;
/// Element types whose values are printed.
const PRINTED: [&str; 7] = ["f32", "f16", "bf16", "i64", "i32", "i16", "i8"];
/// What stands for the values that are left out of an axis.
const GAP: &str = "...";

/// Everything that a text says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Printout {
    /// The nodes in the order in which they were computed.
    pub nodes: Vec<PrintedNode>,
    /// The token ids, where the program printed them.
    pub tokens: Option<Vec<u32>>,
    /// First lines of nodes whose values are cut off, contradict their extents, or that cannot be read.
    pub broken: Vec<String>,
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PrintedNode {
    /// Name.
    pub name: String,
    /// Element type by ggml's name.
    pub dtype: String,
    /// Description of the op.
    pub op: String,
    /// Names and extents of the first one or two sources.
    pub sources: Vec<(String, [usize; DIMS])>,
    /// Extents, fastest axis first as ggml has them.
    pub ne: [usize; DIMS],
    /// The printed values and where they stand, counted with the fastest axis last; none of quantised types.
    pub values: Vec<(usize, f32)>,
    /// The printed sum.
    pub sum: Option<f64>,
}

impl PrintedNode {
    /// How many values the tensor has.
    pub fn elements(&self) -> usize {
        self.ne.iter().product()
    }
}

/// Reads a text. Whatever is no node is passed over.
pub fn parse(text: &str) -> Printout {
    let mut out = Printout::default();
    let mut open: Option<Open> = None;
    for line in text.lines() {
        let header = MARKS.iter().find_map(|mark| line.split_once(mark)).map(|(_, rest)| rest.trim());
        match (header, &mut open) {
            (Some(header), _) => {
                close(open.take(), &mut out);
                match node(header) {
                    Some(node) => {
                        open = Some(Open { header: header.to_owned(), node, body: Body::default() })
                    }
                    None => out.broken.push(header.to_owned()),
                }
            }
            (None, Some(open)) => open.body.line(line.trim()),
            (None, None) => {}
        }
    }
    close(open, &mut out);
    out.tokens = listed_tokens(text).or_else(|| tokens_with_pieces(text));
    out
}

/// The node whose values are being read.
struct Open {
    header: String,
    node: PrintedNode,
    body: Body,
}

fn close(open: Option<Open>, out: &mut Printout) {
    let Some(Open { header, mut node, body }) = open else { return };
    match body.values(&node.ne) {
        Some(values) => (node.values, node.sum) = (values, body.sum),
        // Quantised tensors are never printed; everything else is, or was cut off.
        None if PRINTED.contains(&node.dtype.as_str()) => out.broken.push(header),
        None => {}
    }
    // The graph is followed through nodes without values too.
    out.nodes.push(node);
}

/// `Qcur-0 = (f32) ADD(Qcur-0{128, 5, 1, 1}, blk.0.attn_q.bias{128, 1, 1, 1}}) = {128, 5, 1, 1}`
fn node(header: &str) -> Option<PrintedNode> {
    let (name, rest) = header.split_once(" = (")?;
    let (dtype, rest) = rest.split_once(')')?;
    let (op, rest) = rest.split_once('(')?;
    let (sources, ne) = rest.rsplit_once(") = ")?;
    let ne = extents(ne.trim())?;
    // An extent that no memory holds would overflow the count of values.
    ne.iter().try_fold(1usize, |product, n| product.checked_mul(*n))?;
    let mut list = Vec::new();
    let mut rest = sources.trim();
    while let Some((source, behind)) = rest.split_once('{') {
        let (inner, behind) = behind.split_once('}')?;
        list.push((source.trim().to_owned(), extents(&format!("{{{inner}}}"))?));
        rest = behind.trim_start_matches(',').trim();
    }
    Some(PrintedNode {
        name: name.trim().to_owned(),
        dtype: dtype.trim().to_owned(),
        op: op.trim().to_owned(),
        sources: list,
        ne,
        values: Vec::new(),
        sum: None,
    })
}

/// `{128, 5, 1, 1}`
fn extents(text: &str) -> Option<[usize; DIMS]> {
    let inner = text.strip_prefix('{')?.strip_suffix('}')?;
    let mut ne = [0; DIMS];
    let mut words = inner.split(',');
    for extent in &mut ne {
        *extent = words.next()?.trim().parse().ok()?;
    }
    words.next().is_none().then_some(ne)
}

/// The items of one axis, and how many of them stand before the gap, where there is one.
#[derive(Clone, Debug)]
struct Axis<T> {
    items: Vec<T>,
    gap: Option<usize>,
}

impl<T> Default for Axis<T> {
    fn default() -> Self {
        Axis { items: Vec::new(), gap: None }
    }
}

impl<T> Axis<T> {
    /// Each item's index on an axis of `extent`; `None` where their number contradicts it.
    fn indices(&self, extent: usize) -> Option<impl Iterator<Item = (usize, &T)>> {
        let before = self.gap.unwrap_or(self.items.len());
        let fits = match self.gap {
            Some(_) => self.items.len() < extent,
            None => self.items.len() == extent,
        };
        let skipped = extent.checked_sub(self.items.len()).filter(|_| fits)?;
        Some(self.items.iter().enumerate().map(move |(i, item)| {
            let index = if i < before { i } else { i + skipped };
            (index, item)
        }))
    }
}

type Row = Axis<f32>;
type Plane = Axis<Row>;

/// The lines behind a node's first one.
#[derive(Default)]
struct Body {
    /// One for each index of the slowest axis.
    blocks: Vec<Axis<Plane>>,
    depth: usize,
    sum: Option<f64>,
    contradictory: bool,
}

impl Body {
    fn line(&mut self, line: &str) {
        // Behind the sum of the last block only lines of other origin come.
        if let Some(sum) = line.strip_prefix("sum = ").filter(|_| self.depth == 0 && !self.blocks.is_empty())
        {
            self.sum = sum.trim().parse().ok();
            return;
        }
        let inner = || line.strip_prefix('[')?.trim_end_matches(',').strip_suffix(']');
        match (line.trim_end_matches([',', ' ']), self.depth) {
            ("[", 0) => self.blocks.push(Axis::default()),
            ("[", 1) => self.block(|block| block.items.push(Axis::default())),
            ("]", 1 | 2) => {
                self.depth -= 1;
                return;
            }
            (GAP, 1) => return self.block(|block| block.gap = Some(block.items.len())),
            (GAP, 2) => return self.plane(|plane| plane.gap = Some(plane.items.len())),
            (_, 2) => match inner().and_then(row) {
                Some(row) => return self.plane(|plane| plane.items.push(row)),
                // A row of values that cannot be read is no line of other origin.
                None => return self.contradictory |= line.starts_with('['),
            },
            _ => return,
        }
        self.depth += 1;
    }

    fn block(&mut self, change: impl FnOnce(&mut Axis<Plane>)) {
        if let Some(block) = self.blocks.last_mut() {
            change(block);
        }
    }

    fn plane(&mut self, change: impl FnOnce(&mut Plane)) {
        self.block(|block| {
            if let Some(plane) = block.items.last_mut() {
                change(plane);
            }
        });
    }

    /// Positions and values; `None` where they are cut off or contradict the extents.
    fn values(&self, ne: &[usize; DIMS]) -> Option<Vec<(usize, f32)>> {
        if self.contradictory || self.depth != 0 || self.blocks.len() != ne[3] || self.sum.is_none() {
            return None;
        }
        let mut values = Vec::new();
        for (i3, block) in self.blocks.iter().enumerate() {
            for (i2, plane) in block.indices(ne[2])? {
                for (i1, row) in plane.indices(ne[1])? {
                    let start = ((i3 * ne[2] + i2) * ne[1] + i1) * ne[0];
                    values.extend(row.indices(ne[0])?.map(|(i0, value)| (start + i0, *value)));
                }
            }
        }
        Some(values)
    }
}

/// `0.2140, -0.1113, ..., 0.1140`
fn row(text: &str) -> Option<Row> {
    let mut row = Row::default();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        if word == GAP {
            if row.gap.replace(row.items.len()).is_some() {
                return None;
            }
        } else {
            row.items.push(word.parse().ok()?);
        }
    }
    Some(row)
}

/// `number of input tokens = 5`, then one id at the end of each line, behind what the log begins lines with.
fn listed_tokens(text: &str) -> Option<Vec<u32>> {
    let (_, behind) = text.split_once("number of input tokens = ")?;
    let mut lines = behind.lines();
    let count: usize = lines.next()?.trim().parse().ok()?;
    let id = |line: &str| line.split_whitespace().next_back()?.parse().ok();
    let ids: Vec<u32> = lines.map_while(id).take(count).collect();
    (ids.len() == count && count > 0).then_some(ids)
}

/// `Token ids (5):`, then each token's text with its id behind it: `def(312)  read(863) `. Where the texts
/// look like ids themselves there is more than one reading, and none is taken.
fn tokens_with_pieces(text: &str) -> Option<Vec<u32>> {
    let (_, behind) = text.split_once("Token ids (")?;
    let (count, behind) = behind.split_once("):\n")?;
    let count: usize = count.trim().parse().ok()?;
    // The list ends where the program's next line begins; a text may hold line ends itself.
    let end = behind.find("llama_perf").unwrap_or(behind.len());
    let ids = behind[..end].split('(').skip(1).filter_map(|part| {
        let (digits, rest) = part.split_once(')')?;
        rest.starts_with(' ').then(|| digits.parse().ok()).flatten()
    });
    let ids: Vec<u32> = ids.collect();
    (ids.len() == count && count > 0).then_some(ids)
}
