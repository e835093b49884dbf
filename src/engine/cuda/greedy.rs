//! Greedy decoding whose tokens the GPU chooses itself: no step waits for the host, and what a probe wants of one is
//! copied, and shown, while later ones are computed.

use super::calls::{self, Address, Call};
use super::device::{Buffer, Device, Pinned, address_of, error, failed};
use super::event::Event;
use super::plan::{Output, Plan};
use super::readback::values;
use super::step::unplanned;
use super::{CudaEngine, Planned};
use crate::engine::{Batch, Probe};
use crate::error::Result;

/// Steps whose values are on their way, or kept until they are shown.
const SLOTS: usize = 3;
/// A token on its way, beside the values.
const TOKEN: usize = size_of::<u32>();

/// Where tokens are chosen, and what a probe wants of the steps.
pub struct Choice {
    /// (S,) the token at each position.
    tokens: Buffer,
    /// What the kernel that chooses needs.
    room: Buffer,
    /// Kept from one call to the next: pinned memory takes its time.
    slots: Vec<Slot>,
}

impl Choice {
    /// With room for so many bytes of tokens.
    fn new(device: &Device, bytes: usize) -> Result<Choice> {
        let tokens = device.alloc("the tokens chosen", bytes)?;
        let room = device.alloc("what tokens are chosen with", calls::NEXT_ROOM)?;
        device.clear(&room)?;
        Ok(Choice { tokens, room, slots: Vec::new() })
    }
}

/// What a probe wants of one step.
struct Slot {
    /// A copy that the next step does not write over.
    kept: Buffer,
    /// The same on the host, and behind it the step's token.
    arrived: Pinned,
    is_kept: Event,
    has_arrived: Event,
}

impl Slot {
    fn new(device: &Device, bytes: usize) -> Result<Slot> {
        Ok(Slot {
            kept: device.alloc("the values of a step", bytes)?,
            arrived: device.pinned(bytes.next_multiple_of(TOKEN) + TOKEN)?,
            is_kept: Event::new(device)?,
            has_arrived: Event::new(device)?,
        })
    }
}

/// Where wanted values lie in the arena: the first byte, and how many.
fn range(outputs: &[Output]) -> (usize, usize) {
    let start = outputs.iter().map(|output| output.place.offset).min().unwrap_or(0);
    let end = outputs.iter().map(|output| output.place.offset + output.place.bytes()).max().unwrap_or(0);
    (start, end - start)
}

impl CudaEngine<'_> {
    /// Computes `token` and `steps - 1` that follow it, each the one with the largest logit of the step before: the
    /// `steps` tokens that were chosen, the last of which is not computed. The probe sees what it would of so many steps.
    ///
    /// # Errors
    /// A node that no kernel computes; a probe that wants scores or feeds values; no memory.
    pub fn greedy(&mut self, token: u32, steps: usize, probe: &mut dyn Probe) -> Result<Vec<u32>> {
        let first = self.computed;
        self.check(&Batch { tokens: &[token], first })?;
        self.device.bind()?;
        self.make_room(first + steps)?;
        self.make_plan(&Batch { tokens: &[token], first }, probe)?;
        self.send_tokens(&Batch { tokens: &[token], first })?;
        let size = TOKEN * (self.capacity + 1);
        let mut choice = match self.choice.take().filter(|choice| choice.tokens.bytes >= size) {
            Some(choice) => choice,
            None => Choice::new(&self.device, size)?,
        };
        let tokens = self.choose(&mut choice, (token, steps), probe);
        if tokens.is_err() {
            // Before the memory that copies go to is another's. The error that is reported is the first.
            let _ = self.settle();
        }
        self.choice = Some(choice);
        self.computed = first + tokens.as_ref().map_or(0, Vec::len);
        tokens
    }

    /// The steps of [`Self::greedy`], which have been planned.
    fn choose(
        &mut self,
        Choice { tokens: chosen, room, slots }: &mut Choice,
        (token, steps): (u32, usize),
        probe: &mut dyn Probe,
    ) -> Result<Vec<u32>> {
        let first = self.computed;
        self.device.upload(&[token], chosen.address + (TOKEN * first) as Address)?;
        let next = self.next_token(chosen, room)?;
        let bytes = range(&self.planned()?.outputs).1;
        slots.retain(|slot| slot.kept.bytes >= bytes);
        for _ in slots.len()..if bytes > 0 { SLOTS } else { 0 } {
            slots.push(Slot::new(&self.device, bytes)?);
        }
        let mut shown = 0;
        for step in 0..steps {
            self.launch_step(&next)?;
            if bytes == 0 {
                continue;
            }
            let token = chosen.address + (TOKEN * (first + step)) as Address;
            self.keep(&mut slots[step % SLOTS], token)?;
            if step + 1 >= SLOTS {
                self.show(&slots[shown % SLOTS], first + shown, probe)?;
                shown += 1;
            }
        }
        for step in shown..if bytes > 0 { steps } else { 0 } {
            self.show(&slots[step % SLOTS], first + step, probe)?;
        }
        let tokens = self.device.download(chosen.address + (TOKEN * (first + 1)) as Address, steps)?;
        self.device.copy.synchronize().map_err(failed("a copy"))?;
        Ok(tokens)
    }

    /// The plan of the step.
    fn planned(&self) -> Result<&Plan> {
        self.plan.as_ref().map(|planned| &planned.plan).ok_or_else(unplanned)
    }

    /// The launch that chooses, if every node of the plan is a launch too, and no value depends on the position.
    fn next_token(&mut self, chosen: &Buffer, room: &Buffer) -> Result<Call> {
        let plan = self.planned()?;
        let unfit = if !plan.is_all_gpu() {
            "a node that no kernel computes"
        } else if plan.key.fed || plan.key.cached.is_some() || !plan.compared.is_empty() {
            "a probe that wants scores, compares on the GPU, or feeds values"
        } else {
            ""
        };
        let logits = plan.logits.filter(|_| unfit.is_empty()).ok_or_else(|| {
            error("tokens cannot be chosen on the GPU")
                .expected("steps that the GPU computes alone")
                .found(if unfit.is_empty() { "a graph without logits" } else { unfit })
        })?;
        let step = address_of(&self.step_data);
        let call = calls::next_token(logits, step, chosen.address, room.address, self.graph.dims.vocab);
        self.modules.function(&call, &self.device)?;
        Ok(call)
    }

    /// One step and the choice behind it: launch by launch at first, then as one.
    fn launch_step(&mut self, next: &Call) -> Result<()> {
        let Some(Planned { graph: Some(graph), .. }) = &self.plan else {
            self.enqueue(Some(next))?;
            return self.capture();
        };
        graph.launch().map_err(failed("the graph of a step"))?;
        self.device.launch(self.modules.function(next, &self.device)?, next)
    }

    /// Keeps what is wanted of a step in a slot of which everything has been shown, and starts its way to the host.
    fn keep(&mut self, slot: &mut Slot, token: Address) -> Result<()> {
        let plan = self.planned()?;
        let (start, bytes) = range(&plan.outputs);
        let arena = address_of(&self.arena) + start as Address;
        self.device.copy_within(arena, slot.kept.address, bytes)?;
        slot.is_kept.record(&self.device.compute)?;
        slot.is_kept.hold(&self.device.copy)?;
        let (values, behind) = slot.arrived.bytes_mut().split_at_mut(bytes.next_multiple_of(TOKEN));
        self.device.start_download(slot.kept.address, &mut values[..bytes], &self.device.copy)?;
        // The slot may be larger.
        self.device.start_download(token, &mut behind[..TOKEN], &self.device.copy)?;
        slot.has_arrived.record(&self.device.copy)
    }

    /// Shows what has arrived of the step at `position`.
    fn show(&self, slot: &Slot, position: usize, probe: &mut dyn Probe) -> Result<()> {
        let plan = self.planned()?;
        let (start, bytes) = range(&plan.outputs);
        slot.has_arrived.wait()?;
        let (arrived, behind) = slot.arrived.bytes().split_at(bytes.next_multiple_of(TOKEN));
        let token = u32::from_le_bytes(*behind.first_chunk().expect("a token behind the values"));
        let batch = Batch { tokens: &[token], first: position };
        for output in &plan.outputs {
            let from = output.place.offset - start;
            let shape = self.graph.dims.shape(output.checkpoint.kind(), 1, position + 1);
            let shown = values(&arrived[from..from + output.place.bytes()], output)?;
            probe.record(output.checkpoint, &batch, &shape, shown)?;
        }
        Ok(())
    }
}
