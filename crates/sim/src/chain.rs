//! A chain of layers, and the time a step of it takes at best.
//!
//! After P3 (Jayarajan et al., SysML 2019) and Poseidon (Zhang et al., ATC 2017, table 1) for a co-located store. The
//! lowest-layer-first preemptive rule attains the limit.

use crate::program::{Demands, Instruction, Links, Setup, Submission};
use penstock_core::Error;
use penstock_core::layout::{Book, Tensor};
use penstock_core::types::Dtype;
use penstock_core::wire::Op;
use std::sync::Arc;

/// One layer of a chain.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// Its forward pass.
    pub forward_ns: u64,
    /// Its backward pass.
    pub backward_ns: u64,
    /// fp32 parameters.
    pub parameters: u64,
}

/// A chain of layers trained by some ranks.
#[derive(Debug, Clone)]
pub struct Chain {
    /// In the order of the forward pass.
    pub layers: Vec<Layer>,
    /// Ranks.
    pub ranks: u32,
    /// Length of slices.
    pub slice_bytes: usize,
    /// Window per peer, see [`penstock_core::node::Config::window_bytes`].
    pub window_bytes: u64,
    /// Whether the forward pass decides what goes first.
    pub priority: bool,
    /// The network.
    pub links: Links,
}

impl Chain {
    /// The limit of a step: max over j of [compute of the layers from j on + transfer of the layers up to j], and at least all
    /// the computing. A layer's transfer is that of the sharded store: 2 (n-1)/n of its bytes per direction.
    #[must_use]
    pub fn limit_ns(&self) -> f64 {
        let transfer_ns = |layer: &Layer| {
            let bytes =
                4.0 * layer.parameters as f64 * 2.0 * f64::from(self.ranks - 1) / f64::from(self.ranks);
            bytes / self.links.bytes_per_s as f64 * 1e9
        };
        let compute_ns = |layer: &Layer| (layer.forward_ns + layer.backward_ns) as f64;
        let with_transfer = (0..self.layers.len()).map(|j| {
            let computing: f64 = self.layers[j..].iter().map(compute_ns).sum();
            computing + self.layers[..=j].iter().map(transfer_ns).sum::<f64>()
        });
        with_transfer.fold(self.layers.iter().map(compute_ns).sum(), f64::max)
    }

    /// So many steps of it; each rank marks the end of each forward pass.
    ///
    /// # Errors
    /// If the layers exceed a limit of the layout.
    pub fn setup(&self, steps: u32) -> Result<Setup, Error> {
        let tensors = self.layers.iter().enumerate();
        let tensors =
            tensors.map(|(i, l)| Tensor::new(format!("w{i}"), i as u32, Dtype::F32, l.parameters)).collect();
        let names = (0..self.layers.len()).map(|i| format!("layer{i}")).collect();
        let book = Book::new("chain", names, tensors, self.ranks, self.slice_bytes, 1)?;
        let mut program = vec![Instruction::Open(0), Instruction::Mark];
        for _ in 0..steps {
            for (tensor, layer) in self.layers.iter().enumerate().rev() {
                program.push(Instruction::Compute(layer.backward_ns));
                let (tensor, active) = (tensor as u32, self.ranks);
                let (op, gather_bytes) = (Op::Average, None);
                let submission = Submission { book: 0, tensor, op, absent: false, gather_bytes, active };
                program.push(Instruction::Submit(submission));
            }
            for (tensor, layer) in self.layers.iter().enumerate() {
                program.push(Instruction::Wait { book: 0, tensors: vec![tensor as u32] });
                program.push(Instruction::Compute(layer.forward_ns));
            }
            program.push(Instruction::Mark);
        }
        Ok(Setup {
            seed: 0,
            ranks: self.ranks,
            workers: self.ranks,
            lanes: 1,
            books: vec![Arc::new(book)],
            places: vec![None],
            window_bytes: self.window_bytes,
            priority: self.priority,
            links: self.links.clone(),
            programs: vec![program; self.ranks as usize],
            fault: None,
            sabotage: None,
            demands: Demands { full_rounds: Some(u64::from(steps)), exceptions: 1, links: false },
        })
    }
}
