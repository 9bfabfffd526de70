from recipes.amp.world_model.model import main

if __name__ == "__main__":
    main()
