accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/flux_2_train_network.py \
  --model_version dev --dit /m/flux2.safetensors --vae /m/ae.safetensors --text_encoder /m/mistral.safetensors \
  --dataset_config clips.toml --sdpa --mixed_precision bf16 --timestep_sampling flux2_shift --weighting_scheme none --network_module networks.lora_flux_2 --network_dim 32 \
  --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing --max_data_loader_n_workers 2 --persistent_data_loader_workers \
  --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir /out --output_name mine
