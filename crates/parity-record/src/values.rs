//! The values of one tensor as numbers, read and written through its strides.

use half::f16;

use crate::api::RawTensor;
use crate::describe::Reader;

/// The bytes that a tensor spans, and how its elements lie in them.
pub(crate) struct Values {
    /// As they lie there.
    pub bytes: Vec<u8>,
    dtype: String,
    /// Extents, fastest axis first.
    pub ne: [usize; 4],
    nb: [usize; 4],
}

impl Values {
    /// Reads a tensor.
    ///
    /// # Errors
    /// Where there is none.
    ///
    /// # Safety
    /// `tensor` is null, or alive with its data set.
    pub unsafe fn read(reader: Reader<'_>, tensor: RawTensor) -> Result<Values, String> {
        if tensor.is_null() {
            return Err("the source is missing".to_owned());
        }
        // SAFETY: by the caller's promise.
        unsafe {
            let described = reader.tensor(tensor);
            let mut bytes = vec![0u8; (reader.api.nbytes)(tensor)];
            (reader.api.tensor_get)(tensor, bytes.as_mut_ptr().cast(), 0, bytes.len());
            Ok(Values { bytes, dtype: described.dtype, ne: described.ne, nb: described.nb })
        }
    }

    /// Byte offsets of all elements in logical order.
    fn places(&self) -> Vec<usize> {
        let ([n0, n1, n2, n3], [b0, b1, b2, b3]) = (self.ne, self.nb);
        let mut places = Vec::with_capacity(n0 * n1 * n2 * n3);
        for d in 0..n3 {
            for c in 0..n2 {
                for b in 0..n1 {
                    places.extend((0..n0).map(|a| a * b0 + b * b1 + c * b2 + d * b3));
                }
            }
        }
        places
    }

    /// All elements in logical order.
    ///
    /// # Errors
    /// A type that is not edited.
    pub fn numbers(&self) -> Result<Vec<f64>, String> {
        let bytes = &self.bytes;
        let four = |p: usize| [bytes[p], bytes[p + 1], bytes[p + 2], bytes[p + 3]];
        let half = |p: usize| f16::from_bits(u16::from_ne_bytes([bytes[p], bytes[p + 1]])).to_f64();
        let number: Box<dyn Fn(usize) -> f64> = match self.dtype.as_str() {
            "f32" => Box::new(|p| f64::from(f32::from_ne_bytes(four(p)))),
            "f16" => Box::new(half),
            "i32" => Box::new(|p| f64::from(i32::from_ne_bytes(four(p)))),
            other => return Err(format!("values of type {other} are not edited")),
        };
        Ok(self.places().into_iter().map(number).collect())
    }

    /// Writes all elements.
    ///
    /// # Errors
    /// A type that is not edited, another number of elements.
    pub fn set(&mut self, numbers: &[f64]) -> Result<(), String> {
        let places = self.places();
        if places.len() != numbers.len() {
            return Err(format!("{} values where {} are wanted", numbers.len(), places.len()));
        }
        for (place, &number) in places.into_iter().zip(numbers) {
            let bytes: &[u8] = match self.dtype.as_str() {
                "f32" => &(number as f32).to_ne_bytes(),
                "f16" => &f16::from_f64(number).to_bits().to_ne_bytes(),
                "i32" => &(number as i32).to_ne_bytes(),
                other => return Err(format!("values of type {other} are not edited")),
            };
            self.bytes[place..place + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }
}
