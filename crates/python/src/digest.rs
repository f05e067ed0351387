//! Digests of memory, by which ranks compare what they hold; and of bytes in a file.

use crate::errors::bad_argument;
use pyo3::prelude::*;
use std::ptr::NonNull;
use xxhash_rust::xxh3::xxh3_64;

/// One digest for each range of memory, given as address and length in bytes: 64 bits of XXH3, as a signed number.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // Extracted from Python objects.
pub(crate) fn digests(py: Python<'_>, ranges: Vec<(usize, usize)>) -> PyResult<Vec<i64>> {
    if ranges.iter().any(|&(ptr, nbytes)| ptr == 0 && nbytes > 0) {
        return Err(bad_argument("ptr is null"));
    }
    let digest = |&(ptr, nbytes): &(usize, usize)| {
        let start = NonNull::new(ptr as *mut u8).unwrap_or(NonNull::dangling());
        // SAFETY: `penstock.torch` gives the memory of tensors that it holds, and that nobody writes during the call.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), nbytes) };
        xxh3_64(bytes).cast_signed()
    };
    Ok(py.detach(|| ranges.iter().map(digest).collect()))
}

/// The same of bytes that Python holds.
#[pyfunction]
#[pyo3(signature = (data, /))]
pub(crate) fn checksum(py: Python<'_>, data: &[u8]) -> i64 {
    py.detach(|| xxh3_64(data).cast_signed())
}
