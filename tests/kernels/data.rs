//! Random inputs, and memory that kernels can be pointed at.

use half::{bf16, f16};
use parity::engine::cuda::calls::{Address, Weight, on_device};
use parity::engine::cuda::single::Shared;
use parity::gguf::{DType, decode};
use parity::numerics::Storage;
use parity::random;

use crate::host;

/// A small random number generator, so that a failure can be had again.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(random::GAMMA);
        random::mixed(self.0)
    }

    /// Between -1 and 1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// 16-byte aligned memory, filled with a pattern that is NaN in f32 and f16 until it is written.
pub struct Memory {
    place: Place,
    bytes: usize,
}

enum Place {
    Host(Vec<u128>),
    Shared(Shared),
}

impl Memory {
    pub fn new(bytes: usize) -> Memory {
        let place = match host::shared(bytes) {
            Some(mut shared) => {
                shared.bytes_mut().fill(u8::MAX);
                Place::Shared(shared)
            }
            None => Place::Host(vec![u128::MAX; bytes.div_ceil(16)]),
        };
        Memory { place, bytes }
    }

    pub fn of_bytes(bytes: &[u8]) -> Memory {
        let mut memory = Memory::new(bytes.len());
        memory.bytes_mut().copy_from_slice(bytes);
        memory
    }

    pub fn of_f32(values: &[f32]) -> Memory {
        Memory::of_bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Values as a checkpoint holds them.
    pub fn stored(values: &[f32], storage: Storage) -> Memory {
        match storage {
            Storage::F32 => Memory::of_f32(values),
            _ => Memory::of_bytes(
                &values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect::<Vec<u8>>(),
            ),
        }
    }

    /// Room for `n` values.
    pub fn room(n: usize, storage: Storage) -> Memory {
        Memory::new(n * if storage == Storage::F32 { 4 } else { 2 })
    }

    pub fn address(&self) -> Address {
        self.bytes().as_ptr() as Address
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.place {
            // SAFETY: the words hold at least that many bytes.
            Place::Host(words) => unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), self.bytes) },
            Place::Shared(shared) => shared.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.place {
            // SAFETY: the words hold at least that many bytes.
            Place::Host(words) => unsafe {
                std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), self.bytes)
            },
            Place::Shared(shared) => shared.bytes_mut(),
        }
    }

    pub fn values(&self, storage: Storage) -> Vec<f32> {
        let bytes = self.bytes();
        match storage {
            Storage::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            _ => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        }
    }
}

/// A random weight matrix in a format, and its values.
pub struct RandomWeight {
    memory: Memory,
    pub weight: Weight,
    /// (outputs, columns)
    pub values: Vec<f64>,
}

impl RandomWeight {
    pub fn new(random: &mut Random, dtype: DType, outputs: usize, columns: usize) -> RandomWeight {
        let n = outputs * columns;
        let bytes = match dtype {
            DType::F32 => random.values(n).iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::F16 => {
                random.values(n).iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect::<Vec<u8>>()
            }
            DType::BF16 => random.values(n).iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => random_blocks(random, dtype, n / dtype.block_len()),
        };
        let mut values = vec![0f64; n];
        decode(dtype, &bytes, &mut values);
        let memory = Memory::of_bytes(&on_device(&bytes, dtype));
        let weight = Weight { address: memory.address(), dtype, outputs, columns };
        RandomWeight { memory, weight, values }
    }

    pub fn row(&self, o: usize) -> &[f64] {
        &self.values[o * self.weight.columns..(o + 1) * self.weight.columns]
    }

    pub fn bytes(&self) -> usize {
        self.memory.bytes().len()
    }
}

/// Any bytes are a block, but for the scales, which are to be finite.
fn random_blocks(random: &mut Random, dtype: DType, blocks: usize) -> Vec<u8> {
    let scales: &[usize] = match dtype {
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        _ => &[0],
    };
    let mut bytes = Vec::new();
    for _ in 0..blocks {
        let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.bits() as u8).collect();
        for &at in scales {
            block[at..at + 2].copy_from_slice(&f16::from_f32(0.01 * random.value()).to_le_bytes());
        }
        bytes.extend(block);
    }
    bytes
}
