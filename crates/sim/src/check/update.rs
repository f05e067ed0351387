//! What an optimizer makes of one element: the formulas of torch, as plainly as they can be written.

use penstock_core::optimizer::{Rule, Update};
use penstock_core::types::Dtype;

/// What becomes of a tensor's values, with the states beside them.
#[derive(Debug, Clone)]
pub(super) struct Values {
    value: Vec<u8>,
    states: Vec<Vec<u8>>,
    updates: u64,
}

impl Values {
    pub(super) fn new(value: Vec<u8>) -> Self {
        Self { value, states: Vec::new(), updates: 0 }
    }

    pub(super) fn value(&self) -> &[u8] {
        &self.value
    }

    /// States that are kept: none before the first update.
    pub(super) fn states(&self) -> u64 {
        self.states.len() as u64
    }

    /// Updates all with their gradients.
    pub(super) fn update(&mut self, update: &Update, dtype: Dtype, gradient: &[u8]) {
        self.updates += 1;
        let (kept, initial) = match update.optimizer.rule {
            Rule::Elastic => (0, 0.0),
            Rule::Sgd { .. } => (1, 0.0),
            Rule::Adam { .. } => (2, 0.0),
            Rule::Adagrad { initial, .. } => (1, initial),
            Rule::RmsProp { momentum, centered, .. } => {
                (1 + usize::from(momentum != 0.0) + usize::from(centered), 0.0)
            }
        };
        let width = dtype.size_bytes();
        let initial = if dtype == Dtype::F64 {
            initial.to_le_bytes().to_vec()
        } else {
            (initial as f32).to_le_bytes().to_vec()
        };
        self.states.resize(kept, initial.repeat(self.value.len() / width));
        for at in (0..self.value.len()).step_by(width) {
            match dtype {
                Dtype::F64 => self.element_f64(update, at, gradient),
                _ => self.element_f32(update, at, gradient),
            }
        }
    }
}

macro_rules! element {
    ($name:ident, $type:ty) => {
        impl Values {
            fn $name(&mut self, update: &Update, at: usize, gradient: &[u8]) {
                let range = at..at + size_of::<$type>();
                let read = |bytes: &[u8]| {
                    <$type>::from_le_bytes(bytes[range.clone()].try_into().unwrap_or_default())
                };
                let (mut value, mut gradient) = (read(&self.value), read(gradient));
                let number = |option: f64| option as $type;
                let optimizer = update.optimizer;
                let (lr, decay) = (optimizer.lr, optimizer.weight_decay);
                gradient *= number(update.factor);
                let mut kept: Vec<$type> = self.states.iter().map(|state| read(state)).collect();
                match optimizer.rule {
                    Rule::Elastic => value += number(lr) * (gradient - value),
                    Rule::Sgd { momentum, dampening, nesterov } => {
                        if decay != 0.0 {
                            gradient += number(decay) * value;
                        }
                        kept[0] = if self.updates == 1 {
                            gradient
                        } else {
                            kept[0] * number(momentum) + number(1.0 - dampening) * gradient
                        };
                        let way = if nesterov { gradient + number(momentum) * kept[0] } else { kept[0] };
                        value -= number(lr) * way;
                    }
                    Rule::Adam { betas, eps, .. } => {
                        value *= number(1.0 - lr * decay);
                        kept[0] += number(1.0 - betas[0]) * (gradient - kept[0]);
                        kept[1] = kept[1] * number(betas[1]) + number(1.0 - betas[1]) * gradient * gradient;
                        let [one, two] = betas.map(|beta| 1.0 - beta.powf(self.updates as f64));
                        let below = kept[1].sqrt() / number(two.sqrt()) + number(eps);
                        value -= number(lr / one) * kept[0] / below;
                    }
                    Rule::Adagrad { lr_decay, eps, .. } => {
                        gradient += number(decay) * value;
                        kept[0] += gradient * gradient;
                        let lr = lr / (1.0 + (self.updates - 1) as f64 * lr_decay);
                        value -= number(lr) * gradient / (kept[0].sqrt() + number(eps));
                    }
                    Rule::RmsProp { alpha, eps, momentum, centered } => {
                        gradient += number(decay) * value;
                        kept[0] = kept[0] * number(alpha) + number(1.0 - alpha) * gradient * gradient;
                        let mut variance = kept[0];
                        if centered {
                            kept[1] += number(1.0 - alpha) * (gradient - kept[1]);
                            variance -= kept[1] * kept[1];
                        }
                        let mut way = gradient / (variance.sqrt() + number(eps));
                        if let (Some(velocity), true) = (kept.last_mut(), momentum != 0.0) {
                            *velocity = *velocity * number(momentum) + way;
                            way = *velocity;
                        }
                        value -= number(lr) * way;
                    }
                }
                self.value[range.clone()].copy_from_slice(&value.to_le_bytes());
                for (state, number) in self.states.iter_mut().zip(kept) {
                    state[range.clone()].copy_from_slice(&number.to_le_bytes());
                }
            }
        }
    };
}

element!(element_f32, f32);
element!(element_f64, f64);
