//! A node computed with a mistake: injected into a machine, or tried on a node whose recorded output is wrong.

mod scores;

use parity_graph::edit::unwritten;
use parity_graph::rewrite::{Change, Edit, Misreading, Scores};
use parity_graph::{Id, Op, Params};

use super::others::{Other, Others};
use crate::engine::op_by_op::{Number, Product, Unknown, Value, compute};
use crate::gguf::{DType, TensorInfo, TensorRef, misread};
use crate::ops::flash::{self, KeyProducts};
use crate::ops::source::Data;
use crate::ops::{Args, Check, Rule, Source, Strided, rule};

/// A source as a mistake makes it.
enum Made<'a, S> {
    /// As it is.
    Own(Source<'a, S>),
    /// Other values.
    Values(DType, Vec<S>, [usize; 4]),
    /// Other blocks than the file's, for a decoder of their own type.
    Weight(TensorInfo, Vec<u8>),
    /// Other values, of which each matrix lies column by column.
    Transposed(DType, Vec<S>, [usize; 4]),
}

/// A node as a mistake makes it.
pub struct Rewritten<'a, S> {
    op: Op,
    params: Params,
    sources: Vec<Option<Made<'a, S>>>,
    /// The values of a slot, or of another tensor, instead of its own.
    passed: Option<Vec<S>>,
    /// The slot that they are of.
    slot: Option<usize>,
    scores: Option<Scores>,
    /// Products of its queries and keys that are known.
    products: Option<&'a KeyProducts>,
    /// What happens to its result, in order.
    after: Vec<After<'a, S>>,
    /// Without a mistake, and the columns of rows of so many elements that have one.
    part: Option<(Vec<S>, usize, std::ops::Range<usize>)>,
}

enum After<'a, S> {
    Edit(Edit),
    Op(Inserted<'a, S>),
}

/// An op that reads the result, and other values besides.
struct Inserted<'a, S> {
    op: Op,
    params: Params,
    ne: [usize; 4],
    sources: Vec<Option<Made<'a, S>>>,
}

impl<S: Number> Inserted<'_, S> {
    /// What `see` makes of its rule and of what it reads.
    fn with<T>(
        &self,
        values: &[S],
        like: &Args<'_, S>,
        see: impl FnOnce(&Rule, &Args<'_, S>) -> Result<T, Unknown>,
    ) -> Result<T, Unknown> {
        let Inserted { op, params, ne: [a, b, c, d], sources } = self;
        let rule = rule(op).ok_or_else(|| Unknown::no_rule(like.name, op))?;
        let shape = [*d, *c, *b, *a];
        if values.len() != shape.iter().product::<usize>() {
            return Err(Unknown::new(format!("as many elements of {} as {op} reads", like.name)));
        }
        let first = Source { dtype: DType::F32, data: Data::Values(Strided::whole(values, shape)) };
        let others = sources.iter().map(|source| source.as_ref().map(made));
        let sources = [Some(first)].into_iter().chain(others).collect();
        let Args { name, dtype, arithmetic, .. } = *like;
        see(rule, &Args { name, params, sources, shape, dtype, arithmetic, tokens: None })
    }
}

fn edited<S: Number>(edit: &Edit, values: &[S], [d, c, b, a]: [usize; 4]) -> Vec<S> {
    let mut wide: Vec<f64> = values.iter().map(|value| value.to_f64()).collect();
    edit.apply(&mut [a, b, c, d], &mut wide);
    wide.into_iter().map(S::from_f64).collect()
}

impl Product for Rewritten<'_, f32> {
    fn args<'b>(&'b self, like: &Args<'b, f32>) -> Args<'b, f32> {
        self.args(like)
    }

    fn finished(&self, values: Vec<f32>, like: &Args<'_, f32>) -> Value<f32> {
        self.finished(values, like).map(Into::into)
    }
}

impl Rewritten<'_, f64> {
    /// What becomes of values that its rule gives where something comes behind it, and of how far
    /// each may be off: an op that was inserted carries that on and rounds besides.
    ///
    /// # Errors
    /// What the rule of an inserted op refuses.
    pub fn behind(
        &self,
        mut values: Vec<f64>,
        mut error: Vec<f64>,
        like: &Args<'_, f64>,
    ) -> Result<(Vec<f64>, Vec<f64>), Unknown> {
        for after in &self.after {
            (values, error) = match after {
                After::Edit(edit) => {
                    let at = |sign: f64| -> Vec<f64> {
                        let moved = values.iter().zip(&error).map(|(value, error)| value + sign * error);
                        edited(edit, &moved.collect::<Vec<f64>>(), like.shape)
                    };
                    let [value, above, below] = [0.0, 1.0, -1.0].map(at);
                    let moved = value.iter().zip(above.iter().zip(&below)).map(|(value, (above, below))| {
                        // A NaN or Inf moves by nothing.
                        let moved = (above - value).abs().max((below - value).abs());
                        if moved.is_nan() { 0.0 } else { moved }
                    });
                    let moved = moved.collect();
                    (value, moved)
                }
                After::Op(inserted) => inserted.with(&values, like, |rule, args| {
                    let exact = compute(rule, args)?;
                    let mut off = (rule.carry)(args, &exact, 0, &error);
                    if let Check::Bound(bound) | Check::Settled { bound, .. } = &rule.check {
                        off.iter_mut().zip(bound(args, &exact)).for_each(|(off, own)| *off += own);
                    }
                    Ok((exact, off))
                })?,
            };
        }
        Ok((values, error))
    }
}

/// The node under a change; `None` where the change has no place in it.
pub fn rewrite<'a, S: Number>(
    op: &Op,
    args: &Args<'a, S>,
    change: &Change,
    others: Others<'_, 'a, S>,
) -> Option<Rewritten<'a, S>> {
    let mut rewritten = Rewritten {
        op: op.clone(),
        params: *args.params,
        sources: args.sources.iter().map(|source| source.clone().map(Made::Own)).collect(),
        passed: None,
        slot: None,
        scores: None,
        products: None,
        after: Vec::new(),
        part: None,
    };
    rewritten.change(args, change, others)?;
    Some(rewritten)
}

impl<'a, S: Number> Rewritten<'a, S> {
    fn change(&mut self, args: &Args<'a, S>, change: &Change, others: Others<'_, 'a, S>) -> Option<()> {
        match change {
            Change::Words(words) => self.set(words),
            Change::Op(op, words) => {
                self.op = op.clone();
                self.set(words);
            }
            Change::Source { slot, with } => {
                self.sources.resize_with(self.sources.len().max(slot + 1), || None);
                self.sources[*slot] = match with {
                    None => None,
                    Some(with) => Some(self.other(*with, Some(*slot), others)?),
                };
            }
            Change::Exchange(a, b) => {
                self.sources.get(*a.max(b))?;
                self.sources.swap(*a, *b);
            }
            Change::SourceEdit { slot, edit: Edit::Transposed } => {
                let whole = self.source(*slot)?;
                let made = Made::Transposed(whole.dtype, whole.values().into_owned(), whole.shape());
                self.sources[*slot] = Some(made);
            }
            Change::SourceEdit { slot, edit } => self.edit(*slot, &|ne, values| edit.apply(ne, values))?,
            Change::Misread { slot, how } => self.misread(*slot, *how)?,
            Change::Unwritten { slots, mask, held } => {
                let mask = self.source(*mask)?;
                let width = mask.shape()[3];
                let seen: Vec<f64> = mask.values().iter().map(|value| value.to_f64()).collect();
                for slot in slots {
                    self.edit(*slot, &|ne, values| unwritten(*ne, values, (width, &seen), *held))?;
                }
            }
            // What else was picked the node does not know.
            Change::Picked { .. } => return None,
            Change::Bypass { slot } => {
                self.passed = Some(self.source(*slot)?.values().into_owned());
                self.slot = Some(*slot);
            }
            Change::Pass(with) => self.passed = Some(others(*with)?.values()),
            Change::ResultEdit(edit) => self.after.push(After::Edit(edit.clone())),
            Change::After { op, params, ne, srcs } => {
                let of = |src: &Option<Id>| {
                    src.map(|id| self.other(id, None, others)).map_or(Some(None), |m| m.map(Some))
                };
                let sources = srcs.iter().map(of).collect::<Option<Vec<_>>>()?;
                self.after.push(After::Op(Inserted { op: op.clone(), params: *params, ne: *ne, sources }));
            }
            Change::Scores(scores) => self.scores = Some(*scores),
            Change::Part { row, columns, change } => {
                self.change(args, change, others)?;
                let own = compute(rule(&self.op)?, args).ok()?;
                self.part = Some((own, *row, columns.clone()));
            }
            Change::All(changes) => {
                changes.iter().try_for_each(|change| self.change(args, change, others))?;
            }
        }
        Some(())
    }

    /// A weight of the file whose blocks are decoded wrongly.
    fn misread(&mut self, slot: usize, how: Misreading) -> Option<()> {
        let Made::Own(Source { data: Data::Weight(weight), .. }) = self.sources.get(slot)?.as_ref()? else {
            return None;
        };
        misread::applies(how, weight.info.dtype).then_some(())?;
        // Of a table only what is looked up is read.
        let looked_up = self.source(1).filter(|ids| self.op == Op::GetRows && ids.shape()[..3] == [1; 3]);
        let Some(ids) = looked_up else {
            let (info, bytes) = misread::read(how, weight, 0..weight.rows());
            let info = TensorInfo { shape: weight.info.shape.clone(), ..info };
            self.sources[slot] = Some(Made::Weight(info, bytes));
            return Some(());
        };
        let ids: Vec<usize> = ids.values().iter().map(|id| id.to_f64() as usize).collect();
        let places = (0..ids.len()).map(|place| S::from_f64(place as f64)).collect();
        let (info, bytes) = misread::gather(how, weight, &ids)?;
        self.sources[slot] = Some(Made::Weight(info, bytes));
        self.sources[1] = Some(Made::Values(DType::I32, places, [1, 1, 1, ids.len()]));
        Some(())
    }

    fn set(&mut self, words: &[(usize, u32)]) {
        words.iter().for_each(|&(word, bits)| self.params.0[word] = bits);
    }

    /// A tensor of the graph, in place of the source of a slot, if of one.
    fn other(&self, id: Id, slot: Option<usize>, others: Others<'_, 'a, S>) -> Option<Made<'a, S>> {
        Some(match others(id)? {
            Other::Weight(weight) => {
                Made::Own(Source { dtype: weight.info.dtype, data: Data::Weight(weight) })
            }
            Other::Values(values, shape) => {
                let own = slot.and_then(|slot| self.source(slot));
                let shape = own.as_ref().map_or(shape, Source::shape);
                (values.len() == shape.iter().product::<usize>()).then_some(())?;
                Made::Values(own.map_or(DType::F32, |own| own.dtype), values, shape)
            }
        })
    }

    fn source(&self, slot: usize) -> Option<Source<'_, S>> {
        self.sources.get(slot)?.as_ref().map(made)
    }

    fn edit(&mut self, slot: usize, edit: &dyn Fn(&mut [usize; 4], &mut Vec<f64>)) -> Option<()> {
        let source = self.source(slot)?;
        let [d, c, b, a] = source.shape();
        let (dtype, mut ne) = (source.dtype, [a, b, c, d]);
        let mut values: Vec<f64> = source.values().iter().map(|value| value.to_f64()).collect();
        edit(&mut ne, &mut values);
        // An edited weight is held in the type of the weight.
        let narrow = |value: f64| if dtype == DType::F32 { f64::from(value as f32) } else { value };
        let values = values.into_iter().map(|value| S::from_f64(narrow(value))).collect();
        let [a, b, c, d] = ne;
        self.sources[slot] = Some(Made::Values(dtype, values, [d, c, b, a]));
        Some(())
    }

    /// The same, an attention whose products of queries and keys are known where it has those.
    pub fn knowing(self, products: Option<&'a KeyProducts>) -> Self {
        Rewritten { products, ..self }
    }

    /// Whether nothing is changed but what the node is told and reads: it can be judged by its rule then.
    pub fn is_by_rule(&self) -> bool {
        self.is_by_rule_before() && self.after.is_empty()
    }

    /// As [`Rewritten::is_by_rule`], but for what comes behind the node.
    pub fn is_by_rule_before(&self) -> bool {
        self.passed.is_none() && self.scores.is_none() && self.part.is_none()
    }

    /// The values that are passed on, and the slot that they are of, where that is all.
    pub fn is_passed(&self) -> Option<(&[S], Option<usize>)> {
        let all = self.after.is_empty() && self.part.is_none();
        self.passed.as_ref().filter(|_| all).map(|values| (&values[..], self.slot))
    }

    /// Whether it is the product of a weight of the file with as many rows as the node multiplies, but for what comes behind it.
    pub fn is_product(&self, like: &Args<'_, S>) -> bool {
        let weight = |source: Source<'_, S>| matches!(source.data, Data::Weight(_)).then(|| source.shape());
        let own = like.get(0).cloned().and_then(weight);
        self.op == Op::MulMat
            && self.is_by_rule_before()
            && own.is_some()
            && self.source(0).and_then(weight) == own
            && self.source(1).map(|rows| rows.shape()) == like.get(1).map(Source::shape)
    }

    /// The op that it is computed by.
    pub fn op(&self) -> &Op {
        &self.op
    }

    /// What its rule reads.
    pub fn args<'b>(&'b self, like: &Args<'b, S>) -> Args<'b, S> {
        let sources = self.sources.iter().map(|source| source.as_ref().map(made)).collect();
        let Args { name, shape, dtype, arithmetic, tokens, .. } = *like;
        Args { name, params: &self.params, sources, shape, dtype, arithmetic, tokens }
    }

    /// What the node comes to.
    ///
    /// # Errors
    /// What the rule refuses.
    pub fn values(&self, like: &Args<'_, S>) -> Result<Vec<S>, Unknown> {
        let values = match (&self.passed, self.scores) {
            (Some(passed), _) => passed.clone(),
            (None, Some(scores)) => self.of_scores(like, scores)?,
            (None, None) => self.by_rule(like)?,
        };
        self.finished(values, like)
    }

    fn by_rule(&self, like: &Args<'_, S>) -> Result<Vec<S>, Unknown> {
        let rule = rule(&self.op).ok_or_else(|| Unknown::no_rule(like.name, &self.op))?;
        let args = self.args(like);
        match self.products {
            None => compute(rule, &args),
            known => flash::with_products(&args, known).map_err(|error| Unknown::new(error.to_string())),
        }
    }

    /// What becomes of the values of the node itself.
    ///
    /// # Errors
    /// What the rule of an inserted op refuses.
    pub fn finished(&self, mut values: Vec<S>, like: &Args<'_, S>) -> Result<Vec<S>, Unknown> {
        for after in &self.after {
            values = match after {
                After::Edit(edit) => edited(edit, &values, like.shape),
                After::Op(inserted) => inserted.with(&values, like, compute)?,
            };
        }
        if let Some((own, row, columns)) = &self.part {
            let right = |i: &usize| !columns.contains(&(i % (*row).max(1)));
            (0..values.len().min(own.len())).filter(right).for_each(|i| values[i] = own[i]);
        }
        match values.len() == like.elements() {
            true => Ok(values),
            false => Err(Unknown::new(format!("{} elements of {}", like.elements(), like.name))),
        }
    }
}

fn made<'b, S: Number>(made: &'b Made<'_, S>) -> Source<'b, S> {
    match made {
        Made::Own(source) => source.clone(),
        Made::Values(dtype, values, shape) => {
            Source { dtype: *dtype, data: Data::Values(Strided::whole(values, *shape)) }
        }
        Made::Weight(info, bytes) => {
            Source { dtype: info.dtype, data: Data::Weight(TensorRef { info, bytes }) }
        }
        Made::Transposed(dtype, values, shape) => {
            let whole = Strided::whole(values, *shape);
            let [outer, matrix, ..] = whole.strides;
            Source {
                dtype: *dtype,
                data: Data::Values(Strided { strides: [outer, matrix, 1, shape[2]], ..whole }),
            }
        }
    }
}
