//! Host matrices: rows are token positions (or weight rows), row-major, slowest axis first.

use crate::scalar::Scalar;

/// An owned row-major matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matrix<S> {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// (rows, cols)
    pub data: Vec<S>,
}

impl<S: Scalar> Matrix<S> {
    /// All zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Matrix { rows, cols, data: vec![S::ZERO; rows * cols] }
    }

    /// Takes `data` as (rows, cols).
    ///
    /// # Panics
    /// If the length is not `rows·cols` (a mistake in the caller, not in data).
    pub fn new(rows: usize, cols: usize, data: Vec<S>) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix of {rows} x {cols}");
        Matrix { rows, cols, data }
    }

    /// The whole matrix, borrowed.
    pub fn view(&self) -> View<'_, S> {
        View { rows: self.rows, cols: self.cols, data: &self.data }
    }

    /// Row `r`, (cols,).
    pub fn row(&self, r: usize) -> &[S] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// Row `r`, (cols,), to write to.
    pub fn row_mut(&mut self, r: usize) -> &mut [S] {
        &mut self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// Appends the rows of `other`.
    pub fn append(&mut self, other: View<'_, S>) {
        if self.rows == 0 {
            self.cols = other.cols;
        }
        assert_eq!(self.cols, other.cols, "appended rows have the same width");
        self.rows += other.rows;
        self.data.extend_from_slice(other.data);
    }
}

/// A borrowed row-major matrix.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, S> {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// (rows, cols)
    pub data: &'a [S],
}

impl<'a, S: Scalar> View<'a, S> {
    /// Borrows `data` as (rows, cols).
    ///
    /// # Panics
    /// If the length is not `rows·cols` (a mistake in the caller, not in data).
    pub fn new(rows: usize, cols: usize, data: &'a [S]) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix of {rows} x {cols}");
        View { rows, cols, data }
    }

    /// Row `r`, (cols,).
    pub fn row(&self, r: usize) -> &'a [S] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// The first `rows`, or all.
    pub fn first(&self, rows: usize) -> View<'a, S> {
        let rows = rows.min(self.rows);
        View { rows, cols: self.cols, data: &self.data[..rows * self.cols] }
    }

    /// Without the first `rows`.
    pub fn after(&self, rows: usize) -> View<'a, S> {
        View { rows: self.rows - rows, cols: self.cols, data: &self.data[rows * self.cols..] }
    }

    /// A copy.
    pub fn to_matrix(&self) -> Matrix<S> {
        Matrix { rows: self.rows, cols: self.cols, data: self.data.to_vec() }
    }
}
