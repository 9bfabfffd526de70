from recipes.amp.evolution.population import main

if __name__ == "__main__":
    main()
