accelerate launch --num_cpu_threads_per_process 1 --num_processes 1 flux_train_network.py \
  --pretrained_model_name_or_path=/m/flux1-dev.safetensors --clip_l=/m/clip_l.safetensors --t5xxl=/m/t5.safetensors --ae=/m/ae.safetensors \
  --dataset_config=clips.toml --output_dir=/out --output_name=lora --save_model_as=safetensors \
  --network_module=networks.lora_flux --network_dim=16 --network_alpha=1 --learning_rate=1e-4 --optimizer_type=AdamW8bit \
  --lr_scheduler=constant --sdpa --max_train_epochs=10 --save_every_n_epochs=1 --mixed_precision=bf16 --gradient_checkpointing \
  --guidance_scale=1.0 --timestep_sampling=flux_shift --model_prediction_type=raw --blocks_to_swap=18 \
  --cache_text_encoder_outputs --cache_latents --masked_loss --noise_offset 0.05
